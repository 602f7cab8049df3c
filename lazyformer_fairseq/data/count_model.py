"""Count-based models, which predict a token from how often it occurred next to the same neighbors in the training text.

They serve as baselines. Masked LMs are compared with :data:`NEIGHBOURS`, which sees two tokens on either side of the
masked one, and causal LMs with :func:`ngram`, which sees the preceding tokens.

All context levels are interpolated with Witten-Bell smoothing (Witten and Bell, 1991, "The zero-frequency problem",
method C). Let c(h, w) be the count of token w in context h, c(h) the count of the context, and t(h) the number of
distinct tokens that occur in it. Then

    P(w | h) = (c(h, w) + t(h) * P(w | shorter h)) / (c(h) + t(h)),

and the recursion ends with the uniform distribution. A level may have two contexts of the same length, such as the
token on the left and the token on the right; their probabilities are averaged.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from lazyformer_fairseq.storage.indexed_format import MappedItems, Prefix

MOST_COUNTED = 20_000_000  # maximum number of training tokens to count, which takes ten seconds

Offsets = tuple[int, ...]  # a context: the positions of its tokens, relative to the predicted token
Levels = tuple[tuple[Offsets, ...], ...]  # from the largest contexts to the smallest
NEIGHBOURS: Levels = (
    ((-2, -1, 1, 2),),
    ((-2, -1, 1), (-1, 1, 2)),
    ((-1, 1),),
    ((-1,), (1,)),
    ((),),
)


def ngram(order: int) -> Levels:
    """Return the contexts of an n-gram model, from the `order` - 1 preceding tokens down to the empty context."""
    lengths = range(order - 1, -1, -1)
    return tuple((tuple(range(-length, 0)),) for length in lengths)


def read_tokens(datasets: Iterable[Prefix], most: int = MOST_COUNTED) -> np.ndarray:
    """Concatenate the tokens of datasets, up to `most` in total, into one array, int64 (N,)."""
    parts = []
    for dataset in datasets:
        parts.append(MappedItems(dataset).ids[:most].astype(np.int64))
        most -= len(parts[-1])
        if not most:
            break
    return np.concatenate(parts or [np.empty(0, np.int64)])


class CountModel:
    """An interpolated count-based language model.

    Contexts are identified by hashes, which have 49 bits for a vocabulary of 32,000. Ten million contexts are expected
    to produce 0.1 collisions.

    Args:
        levels: contexts, from the largest to the smallest.
        symbols: vocabulary size V.
        text: token ids (N,) of the training text. Ids of V or more do not represent tokens and never match.
    """

    def __init__(self, levels: Levels, symbols: int, text: np.ndarray):
        self.levels = levels
        self.symbols = symbols
        self.tables = {offsets: _Table(offsets, text, symbols) for level in levels for offsets in level}

    def log_probabilities(self, ids_BT: np.ndarray, at_BT: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the log probabilities of tokens, float64 (M,), in nats.

        Args:
            ids_BT: input ids (B, T); contexts do not extend beyond the ends of a row.
            at_BT: True at the M positions to predict; `ids_BT` is ignored there.
            targets: ids of the tokens at these positions, (M,), row by row.
        """
        distances = [abs(offset) for offsets in self.tables for offset in offsets]
        widest = max(distances, default=0)
        padded = np.pad(ids_BT, ((0, 0), (widest, widest)), constant_values=self.symbols)
        rows, columns = np.nonzero(at_BT)
        probabilities = np.full(len(targets), 1 / self.symbols)
        for level in reversed(self.levels):
            of_level = []
            for offsets in level:
                context = [padded[rows, columns + widest + offset] for offset in offsets]
                of_level.append(self.tables[offsets].interpolate(context, targets, probabilities))
            probabilities = np.mean(of_level, axis=0)
        return np.log(probabilities)

    def bits(self, ids_BT: np.ndarray, at_BT: np.ndarray, targets: np.ndarray) -> float:
        """Return the loss in bits per token; see :meth:`log_probabilities` for the arguments."""
        return float(-self.log_probabilities(ids_BT, at_BT, targets).mean() / math.log(2))


class _Table:
    """The counts of all contexts with the same offsets.

    Each (context, token) pair is stored as one integer: the context's hash in the high bits and the token id in the
    low bits. Sorting these integers groups the pairs by context.

    Attributes:
        pairs: sorted integers of the distinct pairs.
        pair_counts: number of occurrences of each pair.
        contexts: sorted hashes of the distinct contexts.
        context_counts: number of occurrences of each context.
        types: number of distinct tokens in each context.
    """

    def __init__(self, offsets: Offsets, text: np.ndarray, symbols: int):
        self.token_bits = np.uint64(symbols.bit_length())
        before = max([0, *(-offset for offset in offsets)])
        after = max([0, *offsets])
        count = max(len(text) - before - after, 0)
        tokens = text[before : before + count]
        context = [text[before + offset : before + offset + count] for offset in offsets]
        pairs = self._number(self._hash(context, count), tokens)
        self.pairs, starts = _runs(np.sort(pairs[tokens < symbols]))
        self.pair_counts = np.diff(starts)
        self.contexts, starts = _runs(self.pairs >> self.token_bits)
        self.types = np.diff(starts)
        occurrences_before = np.concatenate([[0], np.cumsum(self.pair_counts)])
        self.context_counts = np.diff(occurrences_before[starts])

    def interpolate(self, context: Sequence[np.ndarray], tokens: np.ndarray, shorter: np.ndarray) -> np.ndarray:
        """Interpolate the probabilities of tokens in their contexts with those in shorter contexts.

        Args:
            context: ids of the context's tokens, one array (M,) per position.
            tokens: ids of the tokens, (M,).
            shorter: probabilities of the tokens in the shorter contexts, (M,).
        """
        hashes = self._hash(context, len(tokens))
        pair_counts = _look_up(self.pairs, self.pair_counts, self._number(hashes, tokens))
        context_counts = _look_up(self.contexts, self.context_counts, hashes)
        types = _look_up(self.contexts, self.types, hashes)
        is_known = context_counts > 0
        total = np.where(is_known, context_counts + types, 1)
        return np.where(is_known, (pair_counts + types * shorter) / total, shorter)

    def _hash(self, context: Sequence[np.ndarray], count: int) -> np.ndarray:
        """Hash contexts, uint64 (count,); `context` has one array (count,) per position in the context.

        The bits are mixed by the finalizer of splitmix64 (Steele et al., 2014).
        """
        hashes = np.zeros(count, np.uint64)
        for tokens in context:
            hashes = (hashes ^ (tokens.astype(np.uint64) + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
            hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            hashes ^= hashes >> np.uint64(31)
        return hashes >> self.token_bits

    def _number(self, hashes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Pack context hashes and token ids into one integer per pair."""
        return (hashes << self.token_bits) | tokens.astype(np.uint64)


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a sorted array's K distinct values and the K + 1 boundaries of their runs, from 0 to its length."""
    is_first = np.ones(len(values), bool)
    is_first[1:] = values[1:] != values[:-1]
    starts = np.flatnonzero(is_first)
    return values[starts], np.append(starts, len(values))


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Look up the values of the wanted keys in the sorted `keys`; a missing key gets 0."""
    if not len(keys):
        return np.zeros(len(wanted))
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
