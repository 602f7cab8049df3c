"""The metrics against values computed by hand."""

import math
import warnings

import numpy as np
import pytest

from lazyformer_fairseq.data.glue.metrics import METRICS


@pytest.mark.parametrize(
    ("name", "predictions", "targets", "expected"),
    [
        ("accuracy", [1, 0, 1, 1], [1, 0, 0, 1], 3 / 4),
        ("f1", [1, 0, 1, 1], [1, 0, 0, 1], 2 * 2 / (2 * 2 + 1 + 0)),  # 2 TP, 1 FP, 0 FN
        ("matthews", [1, 0, 1, 1], [1, 0, 0, 1], (2 * 1 - 1 * 0) / math.sqrt(3 * 2 * 2 * 1)),
        # 3 of 4 right; predicted 2, 1, 1 times, true 1, 1, 2 times
        ("matthews", [0, 1, 2, 0], [0, 1, 2, 2], (3 * 4 - 5) / math.sqrt((16 - 6) * (16 - 6))),
        ("pearson", [1.0, 2.0, 3.0], [1.0, 2.0, 4.0], 3 / math.sqrt(2 * 42 / 9)),
        ("spearman", [1.0, 2.0, 3.0, 4.0], [10.0, 9.0, 20.0, 30.0], 1 - 6 * (1 + 1) / (4 * 15)),
        ("spearman", [1.0, 2.0, 2.0], [1.0, 2.0, 3.0], math.sqrt(3) / 2),  # ranks 1, 2.5, 2.5
    ],
)
def test_by_hand(name, predictions, targets, expected):
    assert METRICS[name](np.array(predictions), np.array(targets)) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["matthews", "pearson", "spearman", "f1"])
@pytest.mark.parametrize(
    ("predictions", "targets"), [([0, 0, 0], [0, 1, 1]), ([0, 1, 1], [0, 0, 0]), ([0, 0], [0, 0]), ([0], [0])]
)
def test_undefined_is_zero_and_silent(name, predictions, targets):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert METRICS[name](np.array(predictions), np.array(targets)) == 0.0


def test_nearly_constant_scores_are_silent():
    scores = np.float32(2.5) + np.array([0, 1e-14, 2e-14])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert -1 <= METRICS["pearson"](scores, np.array([1.0, 2.0, 3.0])) <= 1
