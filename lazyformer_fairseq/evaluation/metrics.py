"""Metrics for classification, regression and tagging, under the names used by tasks."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from scipy import stats
from sklearn import metrics as of_sklearn

Metric = Callable[[np.ndarray, np.ndarray], float]


def _correlation(function: Callable) -> Metric:
    def value(predictions: np.ndarray, targets: np.ndarray) -> float:
        for values in (predictions, targets):
            if len(values) < 2 or (values == values[0]).all():
                return 0.0
        with warnings.catch_warnings():
            # Predictions may differ only in their last digits, as at the start of training.
            warnings.simplefilter("ignore", stats.NearConstantInputWarning)
            answer = function(targets.astype(np.float64), predictions.astype(np.float64))
            return float(getattr(answer, "statistic", answer))  # scipy also returns a p-value

    return value


METRICS: Mapping[str, Metric] = {
    "accuracy": lambda predictions, targets: float(of_sklearn.accuracy_score(targets, predictions)),
    # F1 of class 1; 0.0 if the class is neither predicted nor present.
    "f1": lambda predictions, targets: float(of_sklearn.f1_score(targets, predictions, zero_division=0.0)),
    # The unweighted mean of the classes' F1.
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


# --- tags of words ----------------------------------------------------------------------------------------------------


def entities(tags: Iterable[str]) -> set[tuple[str, int, int]]:
    """Extract the entities from a sentence's tags in the same way as conlleval.

    An entity begins at a ``B-`` tag, or at an ``I-`` tag that does not continue an entity of the same type.

    Returns:
        The entities as tuples of type, index of the first word, and index after the last word.
    """
    found = set()
    current = ""
    start = 0
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, entity = tag.partition("-")
        if current and (prefix != "I" or entity != current):
            found.add((current, start, place))
            current = ""
        if entity and not current:
            current = entity
            start = place
    return found


def count_tags(predicted: Sequence[str], right: Sequence[str]) -> tuple[int, ...]:
    """Count a sentence's correct tags, words, correct entities, predicted entities and reference entities."""
    hits = sum(map(str.__eq__, predicted, right))
    found = entities(predicted)
    there = entities(right)
    return hits, len(right), len(found & there), len(found), len(there)


def metric_of_tags(name: str, rows: np.ndarray) -> float:
    """Return the accuracy over words, or the F1 over entities of all types.

    Args:
        name: "accuracy" or the name of the F1 metric.
        rows: the counts (N, 5) from :func:`count_tags` for all sentences.
    """
    hits, words, right, predicted, there = rows.sum(axis=0).tolist()
    if name == "accuracy":
        return hits / words
    return 2 * right / max(predicted + there, 1)
