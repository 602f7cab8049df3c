"""Attention on a CPU, computed in chunks of the distribution that fit into the cache.

A chunk consists of consecutive queries of some sequences and heads, and the keys that any of these queries sees. The
back end ``materialize`` keeps the distribution. ``fused`` recomputes the distribution in each forward and backward
function, so memory grows only linearly with the length of the text.

Without a mask, a chunk has all keys, or in a causal model all keys up to its last query. With a mask, it has a few
*runs* of consecutive keys and omits the keys that none of its queries sees. The scores of all runs are stored side by
side. Keys that are not tokens come last, and every query sees them.

Additions to the scores that depend on distances are views of smaller tensors. If there is a bias per distance, the rows
of a chunk are in reverse order, starting with the last query. Row i of the bias is then the window of distances that
starts at i. For Transformer-XL's positions, scores are computed for each query and distance, and a view arranges them
by query and key.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lazyformer_fairseq.modules.attention.lazy_block import Implementation, empty_heads, empty_rows, learned_gradients
from lazyformer_fairseq.modules.attention.masks import Part, shown_by
from lazyformer_fairseq.modules.attention.reused_memory import empty, scratch
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.products import multiply

# The number of elements in a chunk (8 MiB in float32). Chunks of 2^20 or 2^22 elements are slower at 2,048 tokens and
# equally fast at 512.
CHUNK_ELEMENTS = 2**21
# Sequences whose distributions are smaller than this share a chunk. A separate matmul call for each of them would cost
# more than the copy that places heads side by side.
MIN_CHUNK_ELEMENTS = 2**19
# The number of rows in a chunk with a mask. With more rows, more hidden pairs are computed; with fewer rows, matmuls
# are slower.
MASKED_ROWS = 128
_HIDDEN = float("-inf")


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive queries and the tokens that any of them sees.

    Attributes:
        rows: The queries, as a slice of the T queries.
        runs: The tokens, as slices of the K keys.
        hidden: True where a query does not see a token, (rows, tokens of all runs); None without a mask.
    """

    rows: slice
    runs: tuple[slice, ...]
    hidden: Optional[np.ndarray] = None

    @property
    def num_rows(self) -> int:
        """The number of queries."""
        return self.rows.stop - self.rows.start

    @property
    def tokens(self) -> int:
        """The number of tokens in all runs."""
        return sum(run.stop - run.start for run in self.runs)

    def columns(self) -> Iterator[tuple[slice, slice]]:
        """Yield each run of tokens and the slice of its columns in the scores."""
        start = 0
        for run in self.runs:
            stop = start + run.stop - run.start
            yield run, slice(start, stop)
            start = stop


@dataclass(frozen=True, eq=False)
class Chunk:
    """A part of the distribution that is computed at once.

    Attributes:
        sequences, heads: Slices of the batch and of the heads.
        segment: The queries and tokens.
        extra: The number of keys that are not tokens; they follow the tokens.
        is_reversed: Whether the queries are in reverse order.
    """

    sequences: slice
    heads: slice
    segment: Segment
    extra: int
    is_reversed: bool

    @property
    def num_heads(self) -> int:
        """The number of heads."""
        return self.heads.stop - self.heads.start

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (sequences x heads, rows, keys) of the chunk's distribution."""
        num_sequences = self.sequences.stop - self.sequences.start
        groups = num_sequences * self.num_heads
        keys = self.segment.tokens + self.extra
        return groups, self.segment.num_rows, keys

    def turn(self, rows: Tensor) -> Tensor:
        """Convert rows (..., rows, any size) from text order to chunk order, or back."""
        if self.is_reversed:
            return rows.flip(-2)
        return rows

    def select_rows(self, x: Tensor) -> Tensor:
        """Select the chunk's rows (sequences x heads, rows, D) of x (B, N, T, D), in chunk order."""
        rows = x[self.sequences, self.heads, self.segment.rows]
        return self.turn(rows.flatten(0, 1))

    def put_rows(self, out: Tensor, rows: Tensor) -> None:
        """Write rows back to the positions that :meth:`select_rows` reads."""
        there = out[self.sequences, self.heads, self.segment.rows]
        there.copy_(self.turn(rows).view_as(there))

    def select_keys(self, x: Tensor) -> Tensor:
        """Select the chunk's keys (sequences x heads, keys, D) of x (B, N, K, D), without a copy if possible."""
        x = x[self.sequences, self.heads]
        runs = [x[:, :, run] for run in self.segment.runs]
        if self.extra:
            runs.append(x[:, :, -self.extra :])
        if len(runs) == 1:
            keys = runs[0]
        else:
            keys = torch.cat(runs, 2)
        return keys.flatten(0, 1)


def slices(first: int, end: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` entries, from `first` to `end`."""
    for start in range(first, end, size):
        yield slice(start, min(end, start + size))


def segments_of(parts: Optional[tuple[Part, ...]], time: int, tokens: int, is_causal: bool) -> tuple[Segment, ...]:
    """Divide the queries of a group of heads into segments.

    Args:
        parts: The parts of the heads' mask; None without a mask.
        time: T, the number of queries.
        tokens: The number of keys that are tokens.
        is_causal: Whether later keys are hidden from queries.
    """
    if parts is not None:
        most_rows = min(time, MASKED_ROWS, max(1, CHUNK_ELEMENTS // MASKED_ROWS))
        return _masked_segments(parts, time, tokens, is_causal, most_rows)
    most_rows = min(time, max(1, CHUNK_ELEMENTS // max(1, tokens)))
    segments = []
    for rows in slices(0, time, most_rows):
        last = tokens
        if is_causal:
            last = tokens - time + rows.stop
        segments.append(Segment(rows, (slice(0, last),)))
    return tuple(segments)


@functools.lru_cache(maxsize=64)  # one entry per combination of text length and mask
def _masked_segments(
    parts: tuple[Part, ...],
    time: int,
    tokens: int,
    is_causal: bool,
    most_rows: int,
) -> tuple[Segment, ...]:
    places = np.arange(tokens, dtype=np.int32)
    places_of_queries = places[tokens - time :]
    segments = []
    for rows in slices(0, time, most_rows):
        queries = places_of_queries[rows]
        shown = shown_by(parts, queries, places)
        if is_causal:
            shown &= places <= queries[:, None]
        segments.append(_segment(rows, shown))
    return tuple(segments)


def _segment(rows: slice, shown: np.ndarray) -> Segment:
    """Build a segment from its rows and their visibility mask (rows, K)."""
    is_seen = np.any(shown, axis=0)
    if not is_seen.any():  # a matmul needs at least one key, even if no query sees it
        is_seen[0] = True
    edges = np.flatnonzero(np.diff(is_seen, prepend=False, append=False)).tolist()
    firsts = edges[::2]
    ends = edges[1::2]
    runs = tuple(slice(first, end) for first, end in zip(firsts, ends, strict=True))
    return Segment(rows, runs, ~shown[:, is_seen])


def _with_given(segment: Segment, seen_K: np.ndarray, time: int, is_causal: bool) -> Segment:
    """Extend a segment so that its queries also see the tokens that are True in `seen_K`."""
    assert segment.hidden is not None, "without a mask queries see all tokens"
    shown = np.repeat(seen_K[None], segment.num_rows, 0)
    for run, columns in segment.columns():
        shown[:, run] |= ~segment.hidden[:, columns]
    if is_causal:
        tokens = len(seen_K)
        queries = np.arange(segment.rows.start, segment.rows.stop) + tokens - time
        shown &= np.arange(tokens) <= queries[:, None]
    return _segment(segment.rows, shown)


class Addition:
    """The base class of additions to scores. dS is the gradient of the scores."""

    def views(self, chunk: Chunk) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of a chunk's columns and the values to add there, (sequences x heads or fewer, rows, keys)."""
        raise NotImplementedError

    def room(self, _chunk: Chunk) -> Optional[Tensor]:
        """Return a zeroed buffer for dS by query and distance; None if it is not needed or there are several runs."""
        return None

    def add_gradient(self, chunk: Chunk, d_scores: Tensor, room: Optional[Tensor]) -> None:
        """Add a chunk's contribution to the gradients.

        Args:
            chunk: The chunk.
            d_scores: dS, (sequences x heads, rows, keys); a view of `room` unless that is None.
            room: The buffer returned by :meth:`room`.
        """
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the learned parts of :class:`Scores`, by name."""
        raise NotImplementedError


class Dense(Addition):
    """The addition of learned scores for each query-key pair, without a mask.

    Args:
        learned_BNTK: The scores; (1, N, T, K) if all sequences share them.
        batch: B, the number of sequences.
    """

    def __init__(self, learned_BNTK: Tensor, batch: int):
        self.learned = learned_BNTK
        self.is_shared = learned_BNTK.size(0) < batch
        dtype = learned_BNTK.dtype
        if self.is_shared:
            dtype = sum_dtype(learned_BNTK)
        self.sum_like = learned_BNTK.new_empty((), dtype=dtype)
        self.gradient: Optional[Tensor] = None

    def _part(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return the chunk's part of x, (sequences or 1, heads, rows, keys)."""
        sequences = chunk.sequences
        if self.is_shared:
            sequences = slice(None)
        return x[sequences, chunk.heads, chunk.segment.rows, : chunk.shape[2]]

    @override
    def views(self, chunk: Chunk) -> Iterator[tuple[slice, Tensor]]:
        yield slice(None), chunk.turn(self._part(self.learned, chunk))

    @override
    def add_gradient(self, chunk: Chunk, d_scores: Tensor, room: Optional[Tensor]) -> None:
        if self.gradient is None:
            self.gradient = empty(self.learned.shape, self.sum_like).zero_()
        found = chunk.turn(d_scores).unflatten(0, (-1, chunk.num_heads))
        if self.is_shared:
            found = found.sum(0, keepdim=True)
        total = self._part(self.gradient, chunk)
        total += found

    @override
    def gradients(self) -> dict[str, Tensor]:
        assert self.gradient is not None, "there is at least one chunk"
        return {"learned_BNTK": self.gradient.to(self.learned.dtype)}


class ByDistance(Addition):
    """The base class of additions that depend on the distance between query and key.

    Args:
        time: T, the number of queries.
        distances: The number of possible distances. The first one is the distance from the last query to the first key.
            In a causal model, the last one is the distance to the next key, because queries do not see further ahead.
        like: A tensor with the data type of the scores.
    """

    def __init__(self, time: int, distances: int, like: Tensor):
        self.time = time
        self.distances = distances
        self.like = like

    def places(self, segment: Segment, run: slice) -> slice:
        """Return the slice of distances between a segment's queries and a run of keys."""
        first = self.time - segment.rows.stop + run.start
        keys = run.stop - run.start
        end = first + segment.num_rows + keys - 1
        return slice(first, min(self.distances, end))

    def room_for(self, chunk: Chunk, run: slice) -> Tensor:
        """Return a scratch buffer (sequences x heads, rows, distances) for scores indexed by query and distance."""
        groups, rows, _ = chunk.shape
        places = self.places(chunk.segment, run)
        width = places.stop - places.start
        # The buffer extends beyond the last row by one entry per row, because :func:`by_key` also reads these entries,
        # for hidden keys.
        memory = scratch("by_distance", (groups, rows * width + rows), self.like)
        return memory[:, : rows * width].unflatten(1, (rows, width))

    @override
    def room(self, chunk: Chunk) -> Optional[Tensor]:
        runs = chunk.segment.runs
        if len(runs) > 1 or chunk.extra:
            return None
        return self.room_for(chunk, runs[0]).zero_()

    def by_distance(self, chunk: Chunk, d_scores: Tensor, room: Optional[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """Yield, for each run of keys, the slice of its distances and dS, indexed by query and distance.

        If `room` is not None, it already contains dS in this form.
        """
        for run, columns in chunk.segment.columns():
            found = room
            if found is None:
                found = self.room_for(chunk, run).zero_()
                by_key(found, chunk, run.stop - run.start).copy_(d_scores[..., columns])
            yield self.places(chunk.segment, run), found


class Bias(ByDistance):
    """The addition of a learned bias per distance."""

    def __init__(self, table_KN: Tensor, bucket_by_distance: Tensor, q: Tensor, distances: int):
        super().__init__(q.size(-2), distances, q)
        self.table = table_KN
        self.bucket_by_distance = bucket_by_distance
        self.values = table_KN[bucket_by_distance].t().contiguous().to(q.dtype)  # (N, tokens + T - 1)
        self.gradient = torch.zeros_like(self.values, dtype=sum_dtype(q))

    @override
    def views(self, chunk: Chunk) -> Iterator[tuple[slice, Tensor]]:
        for run, columns in chunk.segment.columns():
            first = self.places(chunk.segment, run).start
            windows = self.values[chunk.heads].unfold(-1, run.stop - run.start, 1)
            yield columns, windows[:, first : first + chunk.segment.num_rows]

    @override
    def add_gradient(self, chunk: Chunk, d_scores: Tensor, room: Optional[Tensor]) -> None:
        for places, by_distance in self.by_distance(chunk, d_scores, room):
            total = self.gradient[chunk.heads, places]
            over_rows = by_distance.sum(1, dtype=total.dtype)
            total += over_rows.unflatten(0, (-1, chunk.num_heads)).sum(0)

    @override
    def gradients(self) -> dict[str, Tensor]:
        d_table = torch.zeros_like(self.table, dtype=self.gradient.dtype)
        d_table.index_add_(0, self.bucket_by_distance, self.gradient.t())
        return {"table_KN": d_table.to(self.table.dtype)}


class Positions(ByDistance):
    """The addition of Transformer-XL's position scores, which are computed for each distance and viewed by key."""

    def __init__(self, queries_BNTD: Tensor, vectors_NKD: Tensor, distances: int):
        super().__init__(queries_BNTD.size(-2), distances, queries_BNTD)
        self.queries = queries_BNTD
        self.vectors = vectors_NKD
        self.d_queries = torch.zeros_like(queries_BNTD)
        self.d_vectors = torch.zeros_like(vectors_NKD)

    def _vectors(self, chunk: Chunk, places: slice) -> Tensor:
        """Return the vectors (sequences x heads, distances, D) of a slice of distances."""
        num_sequences = chunk.sequences.stop - chunk.sequences.start
        return self.vectors[chunk.heads, places].repeat(num_sequences, 1, 1)

    @override
    def views(self, chunk: Chunk) -> Iterator[tuple[slice, Tensor]]:
        queries = chunk.select_rows(self.queries)
        for run, columns in chunk.segment.columns():
            by_distance = self.room_for(chunk, run)
            vectors = self._vectors(chunk, self.places(chunk.segment, run))
            torch.bmm(queries, vectors.mT, out=by_distance)
            yield columns, by_key(by_distance, chunk, run.stop - run.start)

    @override
    def add_gradient(self, chunk: Chunk, d_scores: Tensor, room: Optional[Tensor]) -> None:
        queries = chunk.select_rows(self.queries)
        d_queries = torch.zeros_like(queries)
        for places, by_distance in self.by_distance(chunk, d_scores, room):
            d_queries += torch.bmm(by_distance, self._vectors(chunk, places))
            d_vectors = torch.bmm(by_distance.mT, queries)
            total = self.d_vectors[chunk.heads, places]
            total += d_vectors.unflatten(0, (-1, chunk.num_heads)).sum(0)
        chunk.put_rows(self.d_queries, d_queries)

    @override
    def gradients(self) -> dict[str, Tensor]:
        return {"position_queries_BNTD": self.d_queries, "distances_NKD": self.d_vectors}


def additions_of(scores: Scores, q: Tensor, tokens: int) -> list[Addition]:
    """Return the additions to the scores between queries `q` (B, N, T, D) and `tokens` keys."""
    batch, _, time, _ = q.shape
    distances = tokens + time - 1
    if scores.is_causal:
        distances = tokens + 1
    additions: list[Addition] = []
    if scores.table_KN is not None and scores.bucket_by_distance is not None:
        additions.append(Bias(scores.table_KN, scores.bucket_by_distance, q, distances))
    if scores.position_queries_BNTD is not None and scores.distances_NKD is not None:
        additions.append(Positions(scores.position_queries_BNTD, scores.distances_NKD, distances))
    if scores.learned_BNTK is not None:
        additions.append(Dense(scores.learned_BNTK, batch))
    return additions


def by_key(by_distance: Tensor, chunk: Chunk, keys: int) -> Tensor:
    """Return a view (groups, rows, keys), indexed by query and key, of scores indexed by query and distance.

    Entry (i, j) of the view is entry rows - 1 - i + j of the original row i, or entry i + j if rows are in reverse
    order. If this index is beyond the end of the row, the key is hidden, and the view contains a meaningless entry of
    the next row.
    """
    groups, rows, distances = by_distance.shape
    if chunk.is_reversed:
        first = 0
        step = distances + 1
    else:
        first = rows - 1
        step = distances - 1
    return by_distance.as_strided(
        (groups, rows, keys),
        (by_distance.stride(0), step, 1),
        by_distance.storage_offset() + first,
    )


class Blockwise:
    """The distribution P in chunks, which are either read from memory or computed on demand.

    Args:
        q: The queries (B, N, T, D).
        k: The keys (B, N, K, D).
        scores: Everything else that determines P.
        stored: A buffer for P, in which the chunks follow one another; empty to compute P each time.
        is_filled: Whether the buffer already contains P.
    """

    def __init__(self, q: Tensor, k: Tensor, scores: Scores, stored: Tensor, is_filled: bool = True):
        self.q = q
        self.k = k
        self.scores = scores
        self.stored = stored
        self.is_filled = is_filled
        self.scale = 1 / math.sqrt(max(1, q.size(-1)))
        self.time = q.size(-2)
        self.tokens = k.size(-2) - scores.extra
        self.has_queries = q.size(-1) > 0
        self.lengths: list[int] = []
        if scores.lengths_B is not None:
            self.lengths = scores.lengths_B.tolist()
        self.additions = additions_of(scores, q, self.tokens)

    @staticmethod
    def stored_size(q: Tensor, k: Tensor, scores: Scores) -> int:
        """Return the number of elements in a stored distribution, which depends only on the shapes and the mask.

        If no key is hidden, the shapes may be symbolic, so torch.compile can use one graph for all of them.
        """
        batch, heads, time, _ = q.shape
        if scores.mask is None and not scores.is_causal:
            return batch * heads * time * k.size(-2)
        tokens = int(k.size(-2)) - scores.extra
        total = 0
        for group, parts in _groups(scores, int(heads)):
            segments = segments_of(parts, int(time), tokens, scores.is_causal)
            of_head = sum(segment.num_rows * (segment.tokens + scores.extra) for segment in segments)
            total += (group.stop - group.start) * of_head
        return int(batch) * total

    def chunks(self) -> Iterator[tuple[Chunk, Tensor]]:
        """Yield every chunk and its P (sequences x heads, rows, keys), which is valid until the next one is yielded."""
        start = 0
        for chunk in self._cut():
            if not self.stored.numel():
                yield chunk, self._compute(chunk, scratch("probabilities", chunk.shape, self.q))
                continue
            end = start + math.prod(chunk.shape)
            part = self.stored[start:end].view(chunk.shape)
            start = end
            if not self.is_filled:
                self._compute(chunk, part)
            yield chunk, part

    def _cut(self) -> Iterator[Chunk]:
        batch, heads, time, _ = self.q.shape
        scores = self.scores
        for group, parts in _groups(scores, heads):
            segments = segments_of(parts, time, self.tokens, scores.is_causal)
            size = max(segment.num_rows * (segment.tokens + scores.extra) for segment in segments)
            in_group = group.stop - group.start
            heads_at_once = 1
            sequences_at_once = 1
            if parts is not None or len(segments) == 1:
                heads_at_once = min(in_group, max(1, CHUNK_ELEMENTS // max(1, size)))
                sequences_at_once = max(1, MIN_CHUNK_ELEMENTS // max(1, in_group * size))
            seen_BK = None
            if parts is not None and scores.seen_BK is not None:  # these keys differ between sequences
                seen_BK = scores.seen_BK.numpy()
                sequences_at_once = 1

            for sequences in slices(0, batch, sequences_at_once):
                for some_heads in slices(group.start, group.stop, heads_at_once):
                    for segment in segments:
                        own_segment = segment
                        if seen_BK is not None:
                            own_segment = _with_given(segment, seen_BK[sequences.start], time, scores.is_causal)
                        yield Chunk(
                            sequences=sequences,
                            heads=some_heads,
                            segment=own_segment,
                            extra=scores.extra,
                            is_reversed=scores.table_KN is not None,
                        )

    def _compute(self, chunk: Chunk, out: Tensor) -> Tensor:
        """Compute a chunk's P, write it to `out`, and return it."""
        for number, addition in enumerate(self.additions):
            for columns, added in addition.views(chunk):
                here = out[..., columns].unflatten(0, (-1, added.size(-3)))
                if number:
                    here.add_(added)
                else:
                    here.copy_(added)
        if self.additions and chunk.extra:
            out[..., -chunk.extra :] = 0
        if self.has_queries or not self.additions:
            q = chunk.select_rows(self.q) * self.scale
            multiply(q, chunk.select_keys(self.k).mT, out, adds=bool(self.additions))
        may_be_blind = self._hide(chunk, out)

        # For half precision, torch.softmax uses float32 internally. Using torch.exp with each row's log-sum-exp instead
        # would be five times slower on some CPUs.
        if not may_be_blind:
            return torch.softmax(out, -1, out=out)
        is_blind = out.amax(-1, keepdim=True) == _HIDDEN  # rows without a visible key must be zero, not NaN
        torch.softmax(out.masked_fill_(is_blind, 0), -1, out=out)
        return out.masked_fill_(is_blind, 0)

    def _hide(self, chunk: Chunk, out: Tensor) -> bool:
        """Write -inf at hidden keys, and return whether there may be rows without a visible key."""
        segment = chunk.segment
        if segment.hidden is not None:
            is_hidden = chunk.turn(torch.from_numpy(segment.hidden))
            out[..., : segment.tokens].masked_fill_(is_hidden, _HIDDEN)
        elif self.scores.is_causal:
            first = self.tokens - self.time + segment.rows.start  # the index of the first query's own key
            is_future = torch.ones(segment.num_rows, segment.tokens - first, dtype=torch.bool).triu(1)
            out[..., first : segment.tokens].masked_fill_(chunk.turn(is_future), _HIDDEN)

        if self.lengths:
            by_sequence = out.unflatten(0, (-1, chunk.num_heads))
            for scores, length in zip(by_sequence, self.lengths[chunk.sequences], strict=True):
                for run, columns in segment.columns():
                    first_padded = columns.start + max(0, length - run.start)
                    scores[..., first_padded : columns.stop] = _HIDDEN

        if segment.hidden is None or chunk.extra:
            return False
        return bool(self.lengths) or bool(segment.hidden.all(axis=-1).any())

    def room(self, chunk: Chunk) -> Optional[Tensor]:
        """Return a buffer for dS, indexed by query and distance; None if dS should be indexed by query and key."""
        if not self.additions:
            return None
        return self.additions[0].room(chunk)

    def add_product(self, total: Tensor, chunk: Chunk, probabilities: Tensor, rows: Tensor) -> None:
        """Add a chunk's P^T @ rows to a sum over queries.

        Without a mask, the chunk with a head's first rows initializes the sum.

        Args:
            total: The sum (B, N, K, D).
            chunk: The chunk.
            probabilities: The chunk's P or dS, (sequences x heads, rows, keys).
            rows: The rows to multiply by, (sequences x heads, rows, D).
        """
        product = multiply(probabilities.mT, rows).unflatten(0, (-1, chunk.num_heads))
        heads = total[chunk.sequences, chunk.heads]
        segment = chunk.segment
        if segment.hidden is None and not segment.rows.start and not chunk.extra:
            heads[:, :, : segment.tokens].copy_(product)
            heads[:, :, segment.tokens :] = 0
            return
        for run, columns in segment.columns():
            heads[:, :, run] += product[:, :, columns]
        if chunk.extra:
            heads[:, :, -chunk.extra :] += product[:, :, -chunk.extra :]

    def empty_sums(self, like: Tensor) -> Tensor:
        """Return a buffer (B, N, K, D) for sums over queries, zeroed unless chunks initialize the sums."""
        if self.scores.mask is None and not self.scores.extra:
            return empty_heads(like)
        return empty_heads(like).to(sum_dtype(like)).zero_()


def _groups(scores: Scores, heads: int) -> Iterator[tuple[slice, Optional[tuple[Part, ...]]]]:
    """Yield each slice of consecutive heads that see the same keys, and the parts of their mask; None if unmasked."""
    if scores.mask is None:
        yield slice(0, heads), None
        return
    first = 0
    for number, parts in scores.mask.groups:
        yield slice(first, first + number), parts
        first += number


class InChunks(Implementation):
    """The CPU implementation of lazy blocks, which computes attention in chunks.

    Args:
        stores: Whether to keep P. If False, each function recomputes it.
    """

    def __init__(self, stores: bool):
        self.stores = stores

    @override
    def saved_like(self, q: Tensor, k: Tensor, scores: Scores) -> Tensor:
        return q.new_empty(self._size(q, k, scores))

    def _size(self, q: Tensor, k: Tensor, scores: Scores) -> int:
        """Return the number of stored elements of P."""
        if not self.stores:
            return 0
        return Blockwise.stored_size(q, k, scores)

    @override
    def attend_forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        stored = empty((self._size(q, k, scores),), q)
        return _weigh(Blockwise(q, k, scores, stored, is_filled=False), v), stored

    @override
    def reuse_forward(self, q: Tensor, k: Tensor, v: Tensor, saved: Tensor, scores: Scores) -> Tensor:
        return _weigh(Blockwise(q, k, scores, saved), v)

    @override
    def value_gradient(self, q: Tensor, k: Tensor, d_output: Tensor, saved: Tensor, scores: Scores) -> Tensor:
        distribution = Blockwise(q, k, scores, saved)
        d_v = distribution.empty_sums(empty_rows(k, d_output))
        for chunk, probabilities in distribution.chunks():
            distribution.add_product(d_v, chunk, probabilities, chunk.select_rows(d_output))
        return d_v.to(d_output.dtype)

    @override
    def block_gradient(
        self,
        q: Tensor,
        k: Tensor,
        values: list[Tensor],
        d_outputs: list[Tensor],
        delta: Tensor,
        saved: Tensor,
        scores: Scores,
    ) -> list[Tensor]:
        """Compute all gradients of a block from dS = P * (sum of dO_i V_i^T - delta).

        The sum over layers is a single matmul, because the values of all layers are concatenated.
        """
        distribution = Blockwise(q, k, scores, saved)
        d_q = empty_heads(q)
        d_k = distribution.empty_sums(k)
        d_v = distribution.empty_sums(values[0])
        for chunk, probabilities in distribution.chunks():
            d_rows = [chunk.select_rows(d_output) for d_output in d_outputs]
            distribution.add_product(d_v, chunk, probabilities, d_rows[0])

            columns = _side_by_side([chunk.select_keys(v) for v in values])
            room = distribution.room(chunk)
            if room is None:
                d_scores = scratch("scores", chunk.shape, q)
            else:
                d_scores = by_key(room, chunk, chunk.segment.tokens)
            multiply(_side_by_side(d_rows), columns.mT, d_scores)
            d_scores.sub_(chunk.select_rows(delta.unsqueeze(-1))).mul_(probabilities)

            if distribution.has_queries:
                d_queries = multiply(d_scores, chunk.select_keys(k)).mul_(distribution.scale)
                chunk.put_rows(d_q, d_queries)
                scaled_queries = chunk.select_rows(q) * distribution.scale
                distribution.add_product(d_k, chunk, d_scores, scaled_queries)
            for addition in distribution.additions:
                addition.add_gradient(chunk, d_scores, room)

        learned: dict[str, Tensor] = {}
        for addition in distribution.additions:
            learned |= addition.gradients()
        return [
            d_q,
            d_k.to(k.dtype),
            d_v.to(values[0].dtype),
            *learned_gradients(learned, q),
        ]


def _weigh(distribution: Blockwise, v: Tensor) -> Tensor:
    """Compute P V (B, N, T, D) for values (B, N, K, D)."""
    output = empty_rows(distribution.q, v)
    for chunk, probabilities in distribution.chunks():
        chunk.put_rows(output, multiply(probabilities, chunk.select_keys(v)))
    return output


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors, -1)


def sum_dtype(like: Tensor) -> torch.dtype:
    """Return the data type in which sums are accumulated, float32 or higher."""
    return torch.promote_types(like.dtype, torch.float32)
