"""Numbers as a reader wants them."""

import numpy as np
import pytest

from lazyformer_fairseq.report.numbers import mean_bounds, noise_warning, spread


def test_bounds_are_student_s():
    assert mean_bounds(np.array([1.0, 2.0, 3.0])) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    assert mean_bounds(np.array([2.0, 2.0])) == (2.0, 2.0)
    assert mean_bounds(np.array([2.0])) is None


def test_quartiles_that_lie_far_apart_are_said():
    quiet = spread([1.0, 1.0, 1.05, 1.1, 1.1])
    noisy = spread([1.0, 1.0, 2.0, 3.0, 3.0])
    assert noise_warning({"a": quiet, "few": spread([1.0, 2.0])}) == []
    (sentence,) = noise_warning({"a": quiet, "b": noisy, "c": spread([1.0, 1.0, 1.0, 1.2, 9.0])})
    assert sentence.startswith(
        "The machine was noisy: for 2 of 3 timings, the quartiles differ by more than 10% of the median "
    )
    assert "(by 100% for b)." in sentence
