"""Count models, which predict a token from how often it occurred beside the same neighbours in the training text.

They are the yardsticks of this package. A masked LM is compared with :data:`NEIGHBOURS`, which sees two tokens on
either side of the masked one, and a causal LM with :func:`ngram`, which sees the tokens before.

All levels of context are interpolated by the rule of Witten and Bell (1991, "The zero-frequency problem", method C).
With c(h, w) the count of token w in context h, c(h) the count of the context, and t(h) the number of different tokens
in it,

    P(w | h) = (c(h, w) + t(h) * P(w | shorter h)) / (c(h) + t(h)),

and the chain ends with the uniform distribution. A level may have two contexts of the same length, such as the token on
the left and the token on the right; their probabilities are averaged.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from lazyformer_fairseq.storage.indexed_format import MappedItems, Prefix

MOST_COUNTED = 20_000_000  # tokens of the training text to count, at two million per second

Offsets = tuple[int, ...]  # a context: the places of its tokens, relative to the token that is predicted
Levels = tuple[tuple[Offsets, ...], ...]  # from the largest contexts to the smallest
NEIGHBOURS: Levels = (
    ((-2, -1, 1, 2),),
    ((-2, -1, 1), (-1, 1, 2)),
    ((-1, 1),),
    ((-1,), (1,)),
    ((),),
)


def ngram(order: int) -> Levels:
    """Return the contexts of an n-gram model: the `order` - 1 tokens before a token, then fewer, down to none."""
    return tuple((tuple(range(-length, 0)),) for length in range(order - 1, -1, -1))


def read_tokens(datasets: Iterable[Prefix], most: int = MOST_COUNTED) -> np.ndarray:
    """Return the tokens of datasets, one after the other, int64 (N,), with N at most `most`."""
    parts = []
    for dataset in datasets:
        parts.append(MappedItems(dataset).ids[:most].astype(np.int64))
        most -= len(parts[-1])
        if not most:
            break
    return np.concatenate(parts or [np.empty(0, np.int64)])


class CountModel:
    """A count model of a text.

    Contexts are compared by hashes, which have 49 bits for a vocabulary of 32,000. Among ten million contexts, 0.1
    pairs are expected to have the same hash.

    Args:
        levels: the contexts, from the largest to the smallest.
        symbols: V, the size of the vocabulary.
        text: ids (N,) of the training text. Ids of V or more do not stand for a token and never match.
    """

    def __init__(self, levels: Levels, symbols: int, text: np.ndarray):
        self.levels = levels
        self.symbols = symbols
        self.tables = {offsets: _Table(offsets, text, symbols) for level in levels for offsets in level}

    def log_probabilities(self, ids_BT: np.ndarray, at_BT: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the log probabilities of tokens, float64 (M,), in nats.

        Args:
            ids_BT: the ids that a model sees, (B, T); there are no tokens beyond the ends of a row.
            at_BT: True at the M places whose tokens are predicted; `ids_BT` is ignored there.
            targets: the ids of these tokens, (M,), row by row.
        """
        widest = max((abs(offset) for level in self.levels for offsets in level for offset in offsets), default=0)
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
        """Return the loss in bits per token; the arguments are those of :meth:`log_probabilities`."""
        return float(-self.log_probabilities(ids_BT, at_BT, targets).mean() / math.log(2))


class _Table:
    """The counts of the contexts of one shape.

    A pair of a context and a token is stored as one number: the context's hash, with the token's id as its lowest bits.
    So one sort brings all pairs of a context together.

    Attributes:
        pairs: the sorted numbers of the distinct pairs.
        pair_counts: how often each pair occurs.
        contexts: the sorted hashes of the distinct contexts.
        context_counts: how often each context occurs.
        types: how many different tokens occur in each context.
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
        self.context_counts = np.diff(np.concatenate([[0], np.cumsum(self.pair_counts)])[starts])

    def interpolate(self, context: Sequence[np.ndarray], tokens: np.ndarray, shorter: np.ndarray) -> np.ndarray:
        """Return the probabilities of tokens (M,) in their contexts, given those in the shorter contexts (M,)."""
        hashes = self._hash(context, len(tokens))
        pair_counts = _look_up(self.pairs, self.pair_counts, self._number(hashes, tokens))
        context_counts = _look_up(self.contexts, self.context_counts, hashes)
        types = _look_up(self.contexts, self.types, hashes)
        is_known = context_counts > 0
        total = np.where(is_known, context_counts + types, 1)
        return np.where(is_known, (pair_counts + types * shorter) / total, shorter)

    def _hash(self, context: Sequence[np.ndarray], count: int) -> np.ndarray:
        """Return the hash of each context, uint64 (count,), given one array (count,) for each place in the context.

        The bits are spread by the finalizer of splitmix64 (Steele et al., 2014).
        """
        hashes = np.zeros(count, np.uint64)
        for tokens in context:
            hashes = (hashes ^ (tokens.astype(np.uint64) + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
            hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            hashes ^= hashes >> np.uint64(31)
        return hashes >> self.token_bits

    def _number(self, hashes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the numbers of the pairs of contexts and tokens."""
        return (hashes << self.token_bits) | tokens.astype(np.uint64)


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of a sorted array, and where each of them starts; the array's length comes last."""
    starts = np.flatnonzero(np.concatenate([np.ones(min(len(values), 1), bool), values[1:] != values[:-1]]))
    return values[starts], np.append(starts, len(values))


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the values of the wanted keys, or 0 for a key that is not in the sorted `keys`."""
    if not len(keys):
        return np.zeros(len(wanted))
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
