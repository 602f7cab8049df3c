"""The unigram loss: the loss of a model that predicts every token from token frequencies in the training text.

Early in training, the loss stays near this value for a while. The frequencies are counted in the training text, and the
loss is computed on the predicted tokens. The loss is therefore higher than the entropy of the predicted tokens, which
is computed from their own frequencies.
"""

import math
from collections.abc import Collection, Iterable

import numpy as np

from lazyformer_fairseq.progress import Progress

AT_ONCE = 1 << 22  # number of ids to read and count per chunk


def count_tokens(texts: Iterable[np.ndarray], symbols: int) -> np.ndarray:
    """Count the occurrences of each id in texts, which may be memory-mapped; int64 (V,), where V is `symbols`."""
    parts: list[np.ndarray] = []
    for text in texts:
        parts += [text[start : start + AT_ONCE] for start in range(0, len(text), AT_ONCE)]
    counts = np.zeros(symbols, np.int64)
    for part in Progress(
        parts,
        desc="counting tokens",
        unit=" chunks",
        leave=False,
        disable=len(parts) < 32,
    ):
        counts += np.bincount(part, minlength=symbols)
    return counts


def log_frequencies(counts: np.ndarray, never: Collection[int] = ()) -> np.ndarray:
    """Return the log frequency of each id, float64 (V,), with add-one smoothing.

    Args:
        counts: number of occurrences of each id in the training text, (V,).
        never: ids that are never predicted, such as ``<pad>``. They are excluded from the frequencies and get the value
            of a token that did not occur.
    """
    smoothed = counts + 1.0
    smoothed[list(never)] = 0
    total = smoothed.sum()
    return np.log(np.maximum(smoothed, 1) / total)


def unigram_loss_bits(logarithms: np.ndarray, counts: np.ndarray) -> float:
    """Return the loss in bits per token, given the log frequencies (V,) and the target count of each id (V,)."""
    nats = -(logarithms * counts).sum() / counts.sum()
    return float(nats / math.log(2))
