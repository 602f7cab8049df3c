"""Numbers as a reader wants them."""

import numpy as np
import pytest

from lazyformer_fairseq.report.numbers import mean_bounds


def test_bounds_are_student_s():
    assert mean_bounds(np.array([1.0, 2.0, 3.0])) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    assert mean_bounds(np.array([2.0, 2.0])) == (2.0, 2.0)
    assert mean_bounds(np.array([2.0])) is None
