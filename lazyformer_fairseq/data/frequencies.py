"""The unigram loss: bits of a model that knows how often each token occurs in the training text, and no more.

It is the plateau on which trainings begin. Frequencies are of the training text, the cost is that of what is scored:
the entropy of the scored tokens themselves would be lower, as it knows their own frequencies.
"""

import math
from collections.abc import Collection, Iterable

import numpy as np

from lazyformer_fairseq.progress import Progress

AT_ONCE = 1 << 22  # ids, which are read and counted together


def count_pieces(texts: Iterable[np.ndarray], symbols: int) -> np.ndarray:
    """Return how often each id occurs in texts, which may be mapped from files: int64 (V,), V = `symbols`."""
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
    """Logarithms of shares that sum to one, float64 (V,), each count one larger, so that no token is impossible.

    Args:
        counts: how often each id occurs in the training text, (V,).
        never: ids that are never scored, such as ``<pad>``; these get the logarithm of a token that did not occur.
    """
    smoothed = counts + 1.0
    smoothed[list(never)] = 0
    total = smoothed.sum()
    return np.log(np.maximum(smoothed, 1) / total)


def cost_in_bits(logarithms: np.ndarray, counts: np.ndarray) -> float:
    """Return bits per token, by logarithms of frequencies (V,), of tokens that were scored so often each (V,)."""
    return float(-(logarithms * counts).sum() / counts.sum() / math.log(2))
