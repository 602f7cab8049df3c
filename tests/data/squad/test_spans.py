"""The best spans of a window: against all spans, one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.data.squad import spans
from lazyformer_fairseq.data.squad.spans import best_spans


def one_by_one(starts, ends, is_start, is_end, longest, n_best):
    """(score, start, end) of a window's spans, the best first."""
    found = [
        (starts[first] + ends[last], first, last)
        for first in range(len(starts))
        for last in range(first, min(first + longest, len(ends)))
        if is_start[first] and is_end[last]
    ]
    return sorted(found, key=lambda span: (-span[0], *span[1:]))[:n_best]


@given(
    seed=st.integers(0, 10**6),
    windows=st.integers(1, 4),
    tokens=st.integers(1, 9),
    longest=st.integers(1, 12),
    n_best=st.integers(1, 30),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_all_spans_are_compared(seed, windows, tokens, longest, n_best, share):
    rng = np.random.default_rng(seed)
    starts, ends = rng.permutation(2 * windows * tokens).reshape(2, windows, tokens).astype(np.float32)
    starts *= 100  # so that no two sums are equal
    is_start, is_end = rng.random((2, windows, tokens)) < share
    found = best_spans(starts, ends, is_start, is_end, longest, n_best)
    for window in range(windows):
        wanted = one_by_one(*(each[window] for each in (starts, ends, is_start, is_end)), longest, n_best)
        rows = list(zip(*(each[window].tolist() for each in (found.scores, found.starts, found.ends)), strict=True))
        assert rows[: len(wanted)] == [(float(score), *span) for score, *span in wanted]
        assert all(score == -np.inf for score, *_ in rows[len(wanted) :])


def test_the_first_and_shortest_of_equal_spans():
    zeros, all_tokens = np.zeros((1, 5)), np.ones((1, 5), bool)
    found = best_spans(zeros, zeros, all_tokens, all_tokens, longest=3, n_best=1)
    assert (found.starts.item(), found.ends.item()) == (0, 0)


def test_half_precision_and_infinite_logits():
    starts = np.array([[1, np.inf, 5]], np.float16)
    ends = np.array([[1, -np.inf, 2]], np.float16)
    found = best_spans(starts, ends, starts < np.inf, np.ones((1, 3), bool), longest=3, n_best=2)
    assert found.scores.tolist() == [[7.0, 3.0]]
    assert list(zip(found.starts[0].tolist(), found.ends[0].tolist(), strict=True)) == [(2, 2), (0, 2)]


@pytest.mark.parametrize("at_once", [1, 40, 10**6])
def test_memory_is_bounded_and_changes_nothing(monkeypatch, at_once):
    rng = np.random.default_rng(1)
    starts, ends = rng.normal(size=(2, 7, 11))
    allowed = np.ones((7, 11), bool)
    whole = best_spans(starts, ends, allowed, allowed, 4, 5)
    monkeypatch.setattr(spans, "MOST_AT_ONCE", at_once)
    for one, other in zip(whole, best_spans(starts, ends, allowed, allowed, 4, 5), strict=True):
        assert np.array_equal(one, other)
