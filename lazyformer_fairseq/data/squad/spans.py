"""The best spans of each window by the sum of their start's and their end's logit.

All spans that are allowed are compared: run_squad.py looks at those of the 20 best starts and the 20 best ends alone.
"""

from typing import NamedTuple

import numpy as np

MOST_AT_ONCE = 1 << 22  # scores that are in memory at once, 16 MB


class Spans(NamedTuple):
    """Of each window the best spans, the best first.

    Attributes:
        starts, ends: tokens of the input, both inclusive, (N, n).
        scores: sums of logits, float32 (N, n); -inf where there is no further span.
    """

    starts: np.ndarray
    ends: np.ndarray
    scores: np.ndarray


def best_spans(
    starts_NT: np.ndarray,
    ends_NT: np.ndarray,
    is_start_NT: np.ndarray,
    is_end_NT: np.ndarray,
    longest: int,
    n_best: int,
) -> Spans:
    """The `n_best` best spans of each window.

    Args:
        starts_NT, ends_NT: logits of every token as start and as end.
        is_start_NT, is_end_NT: at which tokens an answer may start, and end: bool.
        longest: tokens of an answer.
    """
    number, length = starts_NT.shape
    at_once = max(1, MOST_AT_ONCE // (length * longest))
    of_tokens = (starts_NT, ends_NT, is_start_NT, is_end_NT)
    found = [
        _best(*(each[first : first + at_once] for each in of_tokens), longest, n_best)
        for first in range(0, number, at_once)
    ]
    return Spans(*map(np.concatenate, zip(*found, strict=True)))


def _best(starts, ends, is_start, is_end, longest: int, n_best: int) -> Spans:
    number, length = starts.shape
    starts = np.where(is_start, starts.astype(np.float32), -np.inf)
    ends = np.where(is_end, ends.astype(np.float32), -np.inf)
    padded = np.pad(ends, ((0, 0), (0, longest - 1)), constant_values=-np.inf)
    followers = np.lib.stride_tricks.sliding_window_view(padded, longest, axis=1)  # (N, T, longest)
    scores = (starts[:, :, None] + followers).reshape(number, length * longest)
    n_best = min(n_best, scores.shape[1])
    rows = np.arange(number)[:, None]
    chosen = scores.argmax(1)[:, None] if n_best == 1 else np.argpartition(scores, -n_best, axis=1)[:, -n_best:]
    order = np.lexsort((chosen, -scores[rows, chosen]), axis=1)  # of equal spans the first one, and the shortest
    chosen = chosen[rows, order]
    first, further = np.divmod(chosen, longest)
    return Spans(first, first + further, scores[rows, chosen])
