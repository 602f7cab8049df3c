"""The unigram loss: the loss of a model that only knows how often each token occurs in the training text.

It is the plateau on which a training begins. The frequencies come from the training text, and the loss is that of the
scored tokens. The entropy of the scored tokens would be lower, because it uses their own frequencies.
"""

import math
from collections.abc import Collection, Iterable

import numpy as np

from lazyformer_fairseq.progress import Progress

AT_ONCE = 1 << 22  # ids that are read and counted together


def count_pieces(texts: Iterable[np.ndarray], symbols: int) -> np.ndarray:
    """Count how often each id occurs in texts, which may be memory-mapped: int64 (V,), with V = `symbols`."""
    parts = [text[start : start + AT_ONCE] for text in texts for start in range(0, len(text), AT_ONCE)]
    counts = np.zeros(symbols, np.int64)
    for part in Progress(
        parts,
        desc="counting pieces",
        unit=" parts",
        leave=False,
        disable=len(parts) < 32,
    ):
        counts += np.bincount(part, minlength=symbols)
    return counts


def log_frequencies(counts: np.ndarray, never: Collection[int] = ()) -> np.ndarray:
    """Return the log frequency of each id, float64 (V,), after adding one to each count so that none is impossible.

    Args:
        counts: how often each id occurs in the training text, (V,).
        never: ids that are never scored, such as ``<pad>``; they are left out of the frequencies, and get the value of
            a token that did not occur.
    """
    smoothed = counts + 1.0
    smoothed[list(never)] = 0
    total = smoothed.sum()
    return np.log(np.maximum(smoothed, 1) / total)


def cost_in_bits(logarithms: np.ndarray, counts: np.ndarray) -> float:
    """Return the loss in bits per token, given the log frequencies (V,) and how often each id was scored (V,)."""
    return float(-(logarithms * counts).sum() / counts.sum() / math.log(2))
