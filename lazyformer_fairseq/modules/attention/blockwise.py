"""Attention chunk by chunk on a processor: as many entries of the distribution at a time as a cache holds.

A chunk is some rows of queries of some sequences and heads, against the keys that any of these queries sees. Back end
``materialize`` keeps the distribution, ``fused`` computes it anew in each function, and its memory grows with n alone.

Without a mask the keys of a chunk are all keys, or in a causal model those that do not lie in the future of all its
queries. With a mask they are a few *runs* of neighbouring keys, whose scores stand side by side, and a chunk leaves out
what its own queries do not see. Keys that are no tokens come last, and every query sees them.

What depends on distances is a view of something smaller. Where there is a bias by distance, the rows of a chunk stand
in reverse order, the last query first: then row i of the bias is the window of distances that starts at i.
Transformer-XL's positions give scores by query and distance, of which the scores by query and key are a view.
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

# Size of a chunk: 8 MiB in single precision. 2^20 and 2^22 are slower at 2,048 tokens, alike at 512.
CHUNK_ELEMENTS = 2**21
# Sequences whose distributions are smaller share a chunk: their products are too short to pay for a call each, and
# worth the copy that puts heads side by side.
WORTH_A_CHUNK = 2**19
# Rows of a chunk with a mask. More rows compute more keys that some of them do not see; shorter products are slower.
MASKED_ROWS = 128
_HIDDEN = float("-inf")


@dataclass(frozen=True, eq=False)
class Segment:
    """Neighbouring queries and the tokens that any of them sees.

    Attributes:
        rows: of the T queries.
        runs: of the tokens among the K keys.
        hidden: (rows, tokens of all runs), True at what a query does not see; None without a mask.
    """

    rows: slice
    runs: tuple[slice, ...]
    hidden: Optional[np.ndarray] = None

    @property
    def num_rows(self) -> int:
        """Number of queries."""
        return self.rows.stop - self.rows.start

    @property
    def tokens(self) -> int:
        """Number of tokens that its queries meet."""
        return sum(run.stop - run.start for run in self.runs)

    def columns(self) -> Iterator[tuple[slice, slice]]:
        """Yield each run of tokens, and where its entries are in a row of scores."""
        start = 0
        for run in self.runs:
            stop = start + run.stop - run.start
            yield run, slice(start, stop)
            start = stop


@dataclass(frozen=True, eq=False)
class Chunk:
    """A part of the distribution: a segment of some sequences and heads.

    Attributes:
        sequences, heads: of the batch and of the model.
        segment: rows and keys.
        extra: keys that are no tokens, behind the others.
        is_reversed: whether the last query comes first.
    """

    sequences: slice
    heads: slice
    segment: Segment
    extra: int
    is_reversed: bool

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self.heads.stop - self.heads.start

    @property
    def shape(self) -> tuple[int, int, int]:
        """(sequences x heads, rows, keys)."""
        num_sequences = self.sequences.stop - self.sequences.start
        groups = num_sequences * self.num_heads
        keys = self.segment.tokens + self.extra
        return groups, self.segment.num_rows, keys

    def turn(self, rows: Tensor) -> Tensor:
        """Return rows (..., rows, any size) in the chunk's order, or those in its order in theirs."""
        if self.is_reversed:
            return rows.flip(-2)
        return rows

    def select_rows(self, x: Tensor) -> Tensor:
        """Return its rows of x (B, N, T, D): (sequences x heads, rows, D), in its order."""
        rows = x[self.sequences, self.heads, self.segment.rows]
        return self.turn(rows.flatten(0, 1))

    def put_rows(self, out: Tensor, rows: Tensor) -> None:
        """Write what :meth:`select_rows` reads."""
        there = out[self.sequences, self.heads, self.segment.rows]
        there.copy_(self.turn(rows).view_as(there))

    def select_keys(self, x: Tensor) -> Tensor:
        """Return its keys of x (B, N, K, D): (sequences x heads, keys, D); a view where nothing must be moved."""
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
    """Yield neighbouring slices of at most `size` entries, from `first` up to `end`."""
    for start in range(first, end, size):
        yield slice(start, min(end, start + size))


def segments_of(parts: Optional[tuple[Part, ...]], time: int, tokens: int, is_causal: bool) -> tuple[Segment, ...]:
    """Cut the queries of a group of heads into segments.

    Args:
        parts: of the heads' mask; None where they see everything.
        time: T.
        tokens: K, without keys that are no tokens.
        is_causal: whether the future is hidden.
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


@functools.lru_cache(maxsize=64)  # for each length of text and mask
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
    """Return a segment from what its queries see, (rows, K)."""
    is_seen = np.any(shown, axis=0)
    if not is_seen.any():  # a product needs a key, though nobody sees it
        is_seen[0] = True
    edges = np.flatnonzero(np.diff(is_seen, prepend=False, append=False)).tolist()
    firsts = edges[::2]
    ends = edges[1::2]
    runs = tuple(slice(first, end) for first, end in zip(firsts, ends, strict=True))
    return Segment(rows, runs, ~shown[:, is_seen])


def _with_given(segment: Segment, seen_K: np.ndarray, time: int, is_causal: bool) -> Segment:
    """Return a segment with some more tokens, True in `seen_K`, which all of its queries see."""
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
    """The base of what is added to scores."""

    def views(self, chunk: Chunk) -> Iterator[tuple[slice, Tensor]]:
        """Yield columns of a chunk, and what is added there, (sequences x heads or fewer, rows, keys)."""
        raise NotImplementedError

    def room(self, _chunk: Chunk) -> Optional[Tensor]:
        """Return zeros for dS by query and distance; None where that is not wanted, or keys are not one run."""
        return None

    def add_gradient(self, chunk: Chunk, d_scores: Tensor, room: Optional[Tensor]) -> None:
        """Add the gradient of dS, (sequences x heads, rows, keys): a view of `room` where there is one."""
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients, by the names of their parts of the scores."""
        raise NotImplementedError


class Dense(Addition):
    """Learned scores of every query and key, without a mask.

    Args:
        learned_BNTK: the scores, or (1, N, T, K) for all sequences alike.
        batch: B.
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
        """Return a chunk's part of x, (sequences or 1, heads, rows, keys)."""
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
        assert self.gradient is not None, "there is a chunk"
        return {"learned_BNTK": self.gradient.to(self.learned.dtype)}


class ByDistance(Addition):
    """The base of scores that depend on the distance between query and key.

    Args:
        time: T.
        distances: how many count, those from the last query to the first key first. In a causal model the last one is
            to the next key: nothing sees those further ahead.
        like: a tensor of the scores' precision.
    """

    def __init__(self, time: int, distances: int, like: Tensor):
        self.time = time
        self.distances = distances
        self.like = like

    def places(self, segment: Segment, run: slice) -> slice:
        """Return which distances there are between queries and a run of keys."""
        first = self.time - segment.rows.stop + run.start
        keys = run.stop - run.start
        end = first + segment.num_rows + keys - 1
        return slice(first, min(self.distances, end))

    def room_for(self, chunk: Chunk, run: slice) -> Tensor:
        """Return scratch memory (sequences x heads, rows, distances) for scores by query and distance."""
        groups, rows, _ = chunk.shape
        places = self.places(chunk.segment, run)
        width = places.stop - places.start
        # With one entry per row behind the last row, for what by_key says of hidden keys.
        memory = scratch("by_distance", (groups, rows * width + rows), self.like)
        return memory[:, : rows * width].unflatten(1, (rows, width))

    @override
    def room(self, chunk: Chunk) -> Optional[Tensor]:
        runs = chunk.segment.runs
        if len(runs) > 1 or chunk.extra:
            return None
        return self.room_for(chunk, runs[0]).zero_()

    def by_distance(self, chunk: Chunk, d_scores: Tensor, room: Optional[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """Yield for each run of keys its distances and dS by query and distance, which is `room` where there is one."""
        for run, columns in chunk.segment.columns():
            found = room
            if found is None:
                found = self.room_for(chunk, run).zero_()
                by_key(found, chunk, run.stop - run.start).copy_(d_scores[..., columns])
            yield self.places(chunk.segment, run), found


class Bias(ByDistance):
    """A learned bias by distance."""

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
    """Transformer-XL's positions: scores by query and distance, of which those by query and key are a view."""

    def __init__(self, queries_BNTD: Tensor, vectors_NKD: Tensor, distances: int):
        super().__init__(queries_BNTD.size(-2), distances, queries_BNTD)
        self.queries = queries_BNTD
        self.vectors = vectors_NKD
        self.d_queries = torch.zeros_like(queries_BNTD)
        self.d_vectors = torch.zeros_like(vectors_NKD)

    def _vectors(self, chunk: Chunk, places: slice) -> Tensor:
        """Return the vectors of distances, (sequences x heads, distances, D)."""
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
    """Return what is added to the scores of queries (B, N, T, D) and so many tokens."""
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
    """Return a view of scores by query and distance, (groups, rows, distances), by query and key: (groups, rows, keys).

    Entry (i, j) is entry rows - 1 - i + j of row i, or i + j in reverse order. Where that lies beyond its end, the key
    is hidden, and the entry one of the next row that stands for no key there.
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
    """The distribution P by chunks: read where it is stored, else computed.

    Args:
        q: queries (B, N, T, D).
        k: keys (B, N, K, D).
        scores: what shapes P besides.
        stored: memory for P of all chunks, one behind the other; empty to compute it each time.
        is_filled: whether P is there already.
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
        """Return how many numbers a stored distribution takes, from shapes alone.

        Where nothing is hidden, the shapes may be symbols, so that torch.compile makes one graph for all of them.
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
        """Yield all chunks, each with its P, (sequences x heads, rows, keys), valid until the next chunk."""
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
                sequences_at_once = max(1, WORTH_A_CHUNK // max(1, in_group * size))
            seen_BK = None
            if parts is not None and scores.seen_BK is not None:  # each sequence has keys of its own
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
        """Return P of a chunk, written to `out`."""
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

        # Half precision goes through single inside; torch.exp with a row's log-sum-exp is 5 times slower on some CPUs.
        if not may_be_blind:
            return torch.softmax(out, -1, out=out)
        is_blind = out.amax(-1, keepdim=True) == _HIDDEN  # a row that sees nothing shall be zero, not NaN
        torch.softmax(out.masked_fill_(is_blind, 0), -1, out=out)
        return out.masked_fill_(is_blind, 0)

    def _hide(self, chunk: Chunk, out: Tensor) -> bool:
        """Write -inf at keys that queries do not see; return whether a row may be left with nothing."""
        segment = chunk.segment
        if segment.hidden is not None:
            is_hidden = chunk.turn(torch.from_numpy(segment.hidden))
            out[..., : segment.tokens].masked_fill_(is_hidden, _HIDDEN)
        elif self.scores.is_causal:
            first = self.tokens - self.time + segment.rows.start  # the key at the place of the chunk's first query
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
        """Return memory for dS by query and distance; None where dS is wanted by query and key."""
        if not self.additions:
            return None
        return self.additions[0].room(chunk)

    def add_product(self, total: Tensor, chunk: Chunk, probabilities: Tensor, rows: Tensor) -> None:
        """Add P^T rows to a sum over queries; without a mask the first rows of a head start the sum.

        Args:
            total: the sum, (B, N, K, D).
            chunk: whose P it is.
            probabilities: P, or dS, (sequences x heads, rows, keys).
            rows: (sequences x heads, rows, D).
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
        """Return memory (B, N, K, D) for sums over queries, with zeros where chunks do not start them."""
        if self.scores.mask is None and not self.scores.extra:
            return empty_heads(like)
        return empty_heads(like).to(sum_dtype(like)).zero_()


def _groups(scores: Scores, heads: int) -> Iterator[tuple[slice, Optional[tuple[Part, ...]]]]:
    """Yield neighbouring heads that see the same, and the parts of their mask; None where they see everything."""
    if scores.mask is None:
        yield slice(0, heads), None
        return
    first = 0
    for number, parts in scores.mask.groups:
        yield slice(first, first + number), parts
        first += number


class InChunks(Implementation):
    """The functions of a lazy block, chunk by chunk.

    Args:
        stores: whether P is kept; otherwise each function computes it anew.
    """

    def __init__(self, stores: bool):
        self.stores = stores

    @override
    def saved_like(self, q: Tensor, k: Tensor, scores: Scores) -> Tensor:
        return q.new_empty(self._size(q, k, scores))

    def _size(self, q: Tensor, k: Tensor, scores: Scores) -> int:
        """Return how many numbers of P are kept."""
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
        """Compute dS = P * (sum of dO_i V_i^T - delta), and from it all gradients of a block.

        The sum is one product, as the heads of all values lie side by side.
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
    """Return P V (B, N, T, D) of values (B, N, K, D)."""
    output = empty_rows(distribution.q, v)
    for chunk, probabilities in distribution.chunks():
        chunk.put_rows(output, multiply(probabilities, chunk.select_keys(v)))
    return output


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors, -1)


def sum_dtype(like: Tensor) -> torch.dtype:
    """Return single precision or better, to sum in."""
    return torch.promote_types(like.dtype, torch.float32)
