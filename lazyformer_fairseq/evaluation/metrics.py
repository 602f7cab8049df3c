"""Marks of predictions against labels or scores, by the names that tasks give them."""

import warnings
from collections.abc import Callable, Mapping

import numpy as np
from scipy import stats
from sklearn import metrics as of_sklearn

Metric = Callable[[np.ndarray, np.ndarray], float]


def _correlation(function: Callable) -> Metric:
    def value(predictions: np.ndarray, targets: np.ndarray) -> float:
        if any(len(values) < 2 or (values == values[0]).all() for values in (predictions, targets)):
            return 0.0
        with warnings.catch_warnings():
            # Scores that differ in their last digits only, as at the start of training.
            warnings.simplefilter("ignore", stats.NearConstantInputWarning)
            answer = function(targets.astype(np.float64), predictions.astype(np.float64))
            return float(getattr(answer, "statistic", answer))  # scipy also has a p-value

    return value


METRICS: Mapping[str, Metric] = {
    "accuracy": lambda predictions, targets: float(of_sklearn.accuracy_score(targets, predictions)),
    # Of class 1; 0.0 where that is neither predicted nor there.
    "f1": lambda predictions, targets: float(of_sklearn.f1_score(targets, predictions, zero_division=0.0)),
    # The mean over all classes, whichever is rare.
    "macro_f1": lambda predictions, targets: float(
        of_sklearn.f1_score(targets, predictions, average="macro", zero_division=0.0)
    ),
    "micro_f1": lambda predictions, targets: float(
        of_sklearn.f1_score(targets, predictions, average="micro", zero_division=0.0)
    ),
    "matthews": _correlation(of_sklearn.matthews_corrcoef),
    "pearson": _correlation(stats.pearsonr),
    "spearman": _correlation(stats.spearmanr),
}
