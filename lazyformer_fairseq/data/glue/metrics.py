"""GLUE's metrics over a whole split, from scikit-learn and scipy: name -> function of predictions and targets.

Each takes two arrays (N,) of classes or scores and returns a number. Where a correlation is not defined, because all
predictions or all targets are equal or there are fewer than two, it is 0.0, without a warning: a model that always
gives the same answer is as good as chance.
"""

import warnings
from collections.abc import Callable, Mapping

import numpy as np
from scipy import stats
from sklearn import metrics

Metric = Callable[[np.ndarray, np.ndarray], float]


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Share of predictions that are right."""
    return float(metrics.accuracy_score(targets, predictions))


def f1(predictions: np.ndarray, targets: np.ndarray) -> float:
    """F1 of class 1; 0.0 where class 1 is neither predicted nor there."""
    return float(metrics.f1_score(targets, predictions, pos_label=1, zero_division=0.0))


def matthews(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Matthews' correlation of two classes or more."""
    if _is_constant(predictions) or _is_constant(targets):
        return 0.0
    return float(metrics.matthews_corrcoef(targets, predictions))


def pearson(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Pearson's correlation of scores."""
    return _correlation(stats.pearsonr, predictions, targets)


def spearman(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Spearman's rank correlation of scores."""
    return _correlation(stats.spearmanr, predictions, targets)


METRICS: Mapping[str, Metric] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def _correlation(function: Callable, predictions: np.ndarray, targets: np.ndarray) -> float:
    if _is_constant(predictions) or _is_constant(targets):
        return 0.0
    with warnings.catch_warnings():
        # Scores that differ in their last digits only, as at the start of training.
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        return float(function(predictions.astype(np.float64), targets.astype(np.float64)).statistic)


def _is_constant(values: np.ndarray) -> bool:
    return len(values) < 2 or bool((values == values[0]).all())
