"""Attention chunk by chunk on a processor: as many entries of the distribution at a time as a cache holds.

A chunk is some rows of queries of some sequences and heads, against the keys that any of these queries sees. Back end
``materialize`` keeps the distribution, ``fused`` computes it anew in each function, and its memory grows with n alone.

Without a mask the keys of a chunk are all keys, or in a causal model those that do not lie in the future of all its
queries. With a mask they are a few *runs* of neighbouring keys, whose scores stand side by side, and a chunk leaves out
what its own queries do not see. Keys that are no tokens come last, and every query sees them.

What depends on distances is a view of something smaller. Where there is a relative bias, a chunk has its rows in
reverse order, the last query first: then row i of the bias is the window of distances that starts at i, and its
gradient is the sum along another view. Transformer-XL's positions give scores by query and distance, of which the
scores by query and key are a view (:func:`~lazyformer_fairseq.modules.attention.scores.relative_shift`).
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention.lazy_block import Implementation, empty_heads, empty_rows, learned_gradients
from lazyformer_fairseq.modules.attention.masks import Part
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
    def tokens(self) -> int:
        """How many tokens its queries meet."""
        return sum(run.stop - run.start for run in self.runs)


class Chunk(NamedTuple):
    """A part of the distribution: a segment of some sequences and heads.

    Attributes:
        sequences, heads: of the batch and of the model.
        segment: rows and keys.
        extra: keys that are no tokens, behind the others.
    """

    sequences: slice
    heads: slice
    segment: Segment
    extra: int = 0

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """Index of its part of (B, N, T, ...)."""
        return self.sequences, self.heads, self.segment.rows

    @property
    def num_heads(self) -> int:
        """How many heads it has."""
        return self.heads.stop - self.heads.start

    @property
    def shape(self) -> tuple[int, int, int]:
        """(sequences x heads, rows, keys)."""
        groups = (self.sequences.stop - self.sequences.start) * self.num_heads
        rows = self.segment.rows.stop - self.segment.rows.start
        return groups, rows, self.segment.tokens + self.extra

    def columns(self) -> Iterator[tuple[slice, slice]]:
        """Yield each run of tokens, and where its entries are in a row of the chunk."""
        start = 0
        for run in self.segment.runs:
            stop = start + run.stop - run.start
            yield run, slice(start, stop)
            start = stop

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
    for start in range(0, time, most_rows):
        stop = min(time, start + most_rows)
        if is_causal:
            last = tokens - time + stop
        else:
            last = tokens
        segments.append(Segment(slice(start, stop), (slice(0, last),)))
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
    segments = []
    for start in range(0, time, most_rows):
        stop = min(time, start + most_rows)
        queries = places[tokens - time + start : tokens - time + stop]
        shown = np.zeros((len(queries), tokens), bool)
        for part in parts:
            shown |= part.shows(queries, places)
        if is_causal:
            shown &= places <= queries[:, None]
        is_seen = shown.any(0)
        if not is_seen.any():  # a product needs a key, though nobody sees it
            is_seen[0] = True
        edges = np.flatnonzero(np.diff(is_seen, prepend=False, append=False)).tolist()
        runs = tuple(slice(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True))
        segments.append(Segment(slice(start, stop), runs, ~shown[:, is_seen]))
    return tuple(segments)


def _with_given(segment: Segment, seen_K: np.ndarray, queries: Optional[np.ndarray]) -> Segment:
    """Return a segment with some more tokens, which all of its queries see.

    Args:
        segment: of the mask alone.
        seen_K: True at these tokens.
        queries: places of the segment's queries in a causal model, whose future stays hidden; else None.
    """
    is_seen = seen_K.copy()
    shown = np.repeat(seen_K[None], len(segment.hidden), 0)
    start = 0
    for run in segment.runs:
        stop = start + run.stop - run.start
        is_seen[run] = True
        shown[:, run] |= ~segment.hidden[:, start:stop]
        start = stop
    if queries is not None:
        shown &= np.arange(len(seen_K)) <= queries[:, None]
    edges = np.flatnonzero(np.diff(is_seen, prepend=False, append=False)).tolist()
    runs = tuple(slice(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True))
    return Segment(segment.rows, runs, ~shown[:, is_seen])


class Dense:
    """Learned scores of every query and key: (B, N, T, K), or (1, N, T, K) for all sequences alike; without a mask."""

    def __init__(self, learned: Tensor, batch: int, is_reversed: bool):
        self.learned = learned
        self.is_shared = learned.size(0) < batch
        self.is_reversed = is_reversed
        dtype = learned.dtype
        if self.is_shared:  # it is summed over sequences
            dtype = sum_dtype(learned)
        self.sums = empty(learned.shape, learned.new_empty((), dtype=dtype))

    def _part(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return a chunk's part of x, (sequences or 1, heads, rows, K)."""
        if self.is_shared:
            sequences = slice(None)
        else:
            sequences = chunk.sequences
        return x[sequences, chunk.heads, chunk.segment.rows]

    def views(self, chunk: Chunk) -> Iterator[tuple[slice, Tensor]]:
        """Yield the columns of a chunk, and their scores (sequences or 1, heads, rows, keys) in the chunk's order."""
        part = self._part(self.learned, chunk)[..., : chunk.shape[2]]
        yield slice(None), part.flip(-2) if self.is_reversed else part

    def room(self, chunk: Chunk, like: Tensor) -> Tensor:
        """Return memory for dS of a chunk: that of the gradient, where no other chunk adds to it."""
        part = self._part(self.sums, chunk)
        has_gaps = part.size(0) > 1 and part.size(1) < self.learned.size(1)  # between sequences, for other heads
        if self.is_shared or self.is_reversed or has_gaps:
            return scratch("scores", chunk.shape, like)
        return part.view(-1, *part.shape[2:])[..., : chunk.shape[2]]

    def add_gradient(self, chunk: Chunk, d_scores: Tensor) -> None:
        """Add dS of a chunk, which may stand in :meth:`room`."""
        part = self._part(self.sums, chunk)
        seen = part[..., : chunk.shape[2]]
        if self.is_reversed:
            found = d_scores.flip(1)
        else:
            found = d_scores
        found = found.unflatten(0, (-1, part.size(1)))
        if found.size(0) > seen.size(0):
            found = found.sum(0, keepdim=True)
        if self.is_shared and chunk.sequences.start:
            seen += found
            return
        part[..., chunk.shape[2] :].zero_()
        if found.data_ptr() != seen.data_ptr():
            seen.copy_(found)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient, by the name of its part of the scores."""
        return {"learned_BNTK": self.sums.to(self.learned.dtype)}


class Bias:
    """A learned bias by distance. A chunk sees a view of it: row i, the last query first, is the window at i."""

    def __init__(self, scores: Scores, q: Tensor):
        self.table = scores.table_KN
        self.bucket_by_distance = scores.bucket_by_distance
        self.by_distance = self.table[self.bucket_by_distance].t().contiguous().to(q.dtype)  # (N, tokens + T - 1)
        self.gradient = torch.zeros_like(self.by_distance, dtype=sum_dtype(q))
        self.time = q.size(-2)
        self.padded: Optional[Tensor] = None

    def views(self, chunk: Chunk) -> Iterator[tuple[slice, Tensor]]:
        """Yield columns of a chunk, and their bias (heads, rows, keys), for every sequence alike."""
        for run, columns in chunk.columns():
            first = self._first_window(chunk, run)
            windows = self.by_distance[chunk.heads].unfold(-1, run.stop - run.start, 1)
            yield columns, windows[:, first : first + chunk.shape[1]]

    def _first_window(self, chunk: Chunk, run: slice) -> int:
        """Return where, among all distances, the last query's window begins."""
        return self.time - chunk.segment.rows.stop + run.start

    def room(self, chunk: Chunk, like: Tensor) -> Tensor:
        """Return scratch memory for dS of a chunk; where there is one run, with space for zeros behind each row."""
        if len(chunk.segment.runs) > 1 or chunk.extra:
            self.padded = None
            return scratch("scores", chunk.shape, like)
        groups, rows, keys = chunk.shape
        self.padded = scratch("scores", (groups, rows, keys + rows), like)
        return self.padded[..., :keys]

    def add_gradient(self, chunk: Chunk, d_scores: Tensor) -> None:
        """Add the gradient of dS, which stands in :meth:`room`."""
        rows = chunk.shape[1]
        total = self.gradient[chunk.heads]
        for run, columns in chunk.columns():
            padded = self.padded
            if padded is None:
                padded = F.pad(d_scores[..., columns], (0, rows))
            else:
                padded[..., run.stop - run.start :] = 0
            sums = sum_along_diagonals(padded).unflatten(0, (-1, len(total))).sum(0)
            first = self._first_window(chunk, run)
            total[:, first : first + sums.size(-1)] += sums

    def gradients(self) -> dict[str, Tensor]:
        """Return the table's gradient, by the name of its part of the scores."""
        d_table = torch.zeros_like(self.table, dtype=self.gradient.dtype)
        d_table.index_add_(0, self.bucket_by_distance, self.gradient.t())
        return {"table_KN": d_table.to(self.table.dtype)}


class Positions:
    """Transformer-XL's positions: scores by query and distance, of which those by query and key are a view."""

    def __init__(self, scores: Scores, q: Tensor):
        self.all_queries = scores.position_queries_BNTD
        self.all_distances = scores.distances_NKD
        self.time = q.size(-2)
        self.is_reversed = scores.table_KN is not None
        self.d_queries = torch.zeros_like(self.all_queries)
        self.d_distances = torch.zeros_like(self.all_distances)
        self.d_by_distance: Optional[Tensor] = None

    def _queries(self, chunk: Chunk) -> Tensor:
        return self.all_queries[chunk.rows].flatten(0, 1)

    def _num_distances(self, chunk: Chunk, run: slice) -> int:
        """Return how many distances a row of scores has.

        With a mask it has all between its queries and keys. Without one it has one more than there are keys: what
        :func:`_shifted` then takes from the next row belongs to keys in the future.
        """
        if chunk.segment.hidden is None:
            more = 1
        else:
            more = chunk.shape[1]
        return run.stop - run.start + more

    def _distances(self, chunk: Chunk, run: slice) -> tuple[slice, Tensor]:
        """Return where a chunk's distances are among all, and them: (sequences x heads, those that there are, D)."""
        first = self.time - chunk.segment.rows.stop + run.start
        last = min(self.all_distances.size(1), first + self._num_distances(chunk, run))
        found = self.all_distances[chunk.heads, first:last]
        return slice(first, last), found.repeat(chunk.sequences.stop - chunk.sequences.start, 1, 1)

    def views(self, chunk: Chunk) -> Iterator[tuple[slice, Tensor]]:
        """Yield columns of a chunk, and their scores (sequences x heads, rows, keys)."""
        groups, rows, _ = chunk.shape
        queries = self._queries(chunk)
        for run, columns in chunk.columns():
            by_distance = scratch("by_distance", (groups, rows, self._num_distances(chunk, run)), queries)
            _, distances = self._distances(chunk, run)
            torch.bmm(queries, distances.mT, out=by_distance[..., : distances.size(1)])
            by_key = _shifted(by_distance, run.stop - run.start)
            yield columns, by_key.flip(1) if self.is_reversed else by_key

    def room(self, chunk: Chunk, like: Tensor) -> Tensor:
        """Return scratch memory for dS of a chunk; where there is one run, a view of dS by distance."""
        self.d_by_distance = None
        if len(chunk.segment.runs) > 1 or chunk.extra:
            return scratch("scores", chunk.shape, like)
        groups, rows, keys = chunk.shape
        width = self._num_distances(chunk, chunk.segment.runs[0])
        self.d_by_distance = scratch("scores", (groups, rows, width), like)
        if width > keys + 1:
            self.d_by_distance.zero_()
        else:
            flat = self.d_by_distance.flatten(1)
            flat[:, : rows - 1] = 0
            flat[:, rows - 1 + rows * keys :] = 0
        return _shifted(self.d_by_distance, keys)

    def add_gradient(self, chunk: Chunk, d_scores: Tensor) -> None:
        """Add the gradients of dS, which stands in :meth:`room`."""
        groups, rows, _ = chunk.shape
        queries = self._queries(chunk)
        d_queries = self.d_queries[chunk.rows]
        for run, columns in chunk.columns():
            by_distance = self.d_by_distance
            if by_distance is None:
                by_distance = d_scores.new_zeros(groups, rows, self._num_distances(chunk, run))
                d_by_key = d_scores[..., columns]
                _shifted(by_distance, run.stop - run.start).copy_(d_by_key.flip(1) if self.is_reversed else d_by_key)
            places, distances = self._distances(chunk, run)
            by_distance = by_distance[..., : distances.size(1)]
            d_queries += torch.bmm(by_distance, distances).view_as(d_queries)
            total = self.d_distances[chunk.heads, places]
            total += torch.bmm(by_distance.mT, queries).unflatten(0, (-1, chunk.num_heads)).sum(0)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients, by the names of their parts of the scores."""
        return {"position_queries_BNTD": self.d_queries, "distances_NKD": self.d_distances}


def _shifted(by_distance: Tensor, keys: int) -> Tensor:
    """Return a view of scores by query and distance, (groups, rows, more than keys), by query and key.

    Entry (i, j) is entry rows - 1 - i + j of row i.
    """
    groups, rows, width = by_distance.shape
    strides = (by_distance.stride(0), width - 1, 1)
    return by_distance.as_strided((groups, rows, keys), strides, by_distance.storage_offset() + rows - 1)


class Blockwise:
    """The distribution P by chunks: read where it is stored, else computed.

    Args:
        q, k: (B, N, T, D) and (B, N, K, D).
        scores: what shapes P besides.
        stored: P of all chunks, one behind the other; None to compute it.
    """

    def __init__(self, q: Tensor, k: Tensor, scores: Scores, stored: Optional[Tensor] = None):
        self.q = q
        self.k = k
        self.scores = scores
        self.scale = 1 / math.sqrt(max(1, q.size(-1)))
        self.stored = None
        if stored is not None and stored.numel():
            self.stored = stored
        self.time = q.size(-2)
        self.tokens = k.size(-2) - scores.extra
        self.has_queries = q.size(-1) > 0
        self.is_reversed = scores.table_KN is not None
        self.is_padding = scores.is_padding(self.tokens)
        self.additions: list[Bias | Positions | Dense] = []
        if scores.table_KN is not None:
            self.additions.append(Bias(scores, q))
        if scores.position_queries_BNTD is not None:
            self.additions.append(Positions(scores, q))
        if scores.learned_BNTK is not None:
            self.additions.append(Dense(scores.learned_BNTK, q.size(0), self.is_reversed))
        # Nothing to add, to multiply or to hide: softmax may read dense scores where they stand.
        self.is_only_dense = (
            not self.has_queries
            and scores.learned_BNTK is not None
            and len(self.additions) == 1
            and self.is_padding is None
            and not scores.is_causal
            and scores.learned_BNTK.dtype == q.dtype
        )

    @staticmethod
    def stored_size(q: Tensor, k: Tensor, scores: Scores) -> int:
        """Return how many numbers a stored distribution takes, from shapes alone."""
        batch, heads, time, _ = map(int, q.shape)
        keys = int(k.size(-2))
        if scores.mask is None:  # causal ones leave some unused
            return batch * heads * time * keys
        tokens = keys - scores.extra
        total = 0
        for number, parts in scores.mask.groups:
            for segment in segments_of(parts, time, tokens, scores.is_causal):
                rows = segment.rows.stop - segment.rows.start
                total += number * rows * (segment.tokens + scores.extra)
        return batch * total

    def chunks(self) -> Iterator[tuple[Chunk, Optional[Tensor]]]:
        """Yield all chunks, each with its part of the stored distribution."""
        start = 0
        for chunk in self._cut():
            part = None
            if self.stored is not None:
                end = start + math.prod(chunk.shape)
                part = self.stored[start:end].view(chunk.shape)
                start = end
            yield chunk, part

    def _cut(self) -> Iterator[Chunk]:
        batch, heads, time, _ = self.q.shape
        scores = self.scores
        for group, parts in _groups(scores, heads):
            segments = segments_of(parts, time, self.tokens, scores.is_causal)
            size = max((row.rows.stop - row.rows.start) * (row.tokens + scores.extra) for row in segments)
            in_group = group.stop - group.start
            has_given = parts is not None and scores.seen_BK is not None
            at_once = 1
            several = 1
            if parts is not None or len(segments) == 1:
                several = min(in_group, max(1, CHUNK_ELEMENTS // max(1, size)))
                at_once = max(1, WORTH_A_CHUNK // max(1, in_group * size))
            if has_given:  # each sequence has keys of its own
                at_once = 1
            for sequence in range(0, batch, at_once):
                sequences = slice(sequence, min(batch, sequence + at_once))
                for head in range(group.start, group.stop, several):
                    several_heads = slice(head, min(group.stop, head + several))
                    for segment in segments:
                        if has_given:
                            own = self._with_given(segment, sequence)
                        else:
                            own = segment
                        yield Chunk(sequences, several_heads, own, scores.extra)

    def _with_given(self, segment: Segment, sequence: int) -> Segment:
        queries = None
        if self.scores.is_causal:
            queries = np.arange(segment.rows.start, segment.rows.stop) + self.tokens - self.time
        return _with_given(segment, self.scores.seen_BK[sequence].numpy(), queries)

    def rows(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return a chunk's rows of x (B, N, T, ...): (sequences x heads, rows, ...), in the chunk's order."""
        x = x[chunk.rows].flatten(0, 1)
        if self.is_reversed:
            return x.flip(1)
        return x

    def put_rows(self, out: Tensor, chunk: Chunk, rows: Tensor) -> None:
        """Write where :meth:`rows` reads."""
        if self.is_reversed:
            rows = rows.flip(1)
        out[chunk.rows] = rows.view_as(out[chunk.rows])

    def queries(self, chunk: Chunk) -> Tensor:
        """Return Q / sqrt(D), in the chunk's order."""
        return self.rows(self.q, chunk) * self.scale

    def compute(self, chunk: Chunk, out: Optional[Tensor] = None) -> Tensor:
        """Return P of a chunk, written to `out` if that is given."""
        q = self.queries(chunk)
        if out is None:
            out = scratch("probabilities", chunk.shape, q)
        if self.is_only_dense:
            _, scores = next(self.additions[-1].views(chunk))
            if scores.numel() == out.numel():
                return torch.softmax(scores.reshape(chunk.shape), -1, out=out)

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
        sequences = chunk.sequences
        is_padding = self.is_padding
        if segment.hidden is not None:
            hidden = torch.from_numpy(segment.hidden)
            out[..., : segment.tokens].masked_fill_(hidden.flip(0) if self.is_reversed else hidden, _HIDDEN)
        elif self.scores.is_causal:
            first = self.tokens - self.time + segment.rows.start  # the key at the place of the chunk's first query
            is_future = torch.ones(chunk.shape[1], segment.tokens - first, dtype=torch.bool).triu(1)
            if self.is_reversed:
                hidden = is_future.flip(0)
            else:
                hidden = is_future
            out[..., first : segment.tokens].masked_fill_(hidden, _HIDDEN)
        if is_padding is not None and len(segment.runs) == 1 and sequences.stop - sequences.start == 1:
            first = int(self.scores.lengths_B[sequences.start]) - segment.runs[0].start
            out[..., max(0, first) : segment.tokens] = _HIDDEN
        elif is_padding is not None and segment.runs:
            here = torch.cat([is_padding[sequences, run] for run in segment.runs], 1)[:, None, None]
            by_sequence = out[..., : segment.tokens].unflatten(0, (-1, chunk.num_heads))
            by_sequence.masked_fill_(here, _HIDDEN)
        if segment.hidden is None or chunk.extra:
            return False
        return is_padding is not None or bool(segment.hidden.all(-1).any())

    def read(self, chunk: Chunk, stored: Optional[Tensor]) -> Tensor:
        """Return P of a chunk, read if it is stored, else computed."""
        if stored is None:
            return self.compute(chunk)
        return stored

    def add_product(self, total: Tensor, chunk: Chunk, probabilities: Tensor, rows: Tensor) -> None:
        """Add P^T rows to a sum over queries (B, N, K, D); without a mask the first rows of a head start the sum."""
        product = multiply(probabilities.mT, rows).unflatten(0, (-1, chunk.num_heads))
        heads = total[chunk.sequences, chunk.heads]
        segment = chunk.segment
        if segment.hidden is None and not segment.rows.start and not chunk.extra:
            heads[:, :, : segment.tokens].copy_(product)
            heads[:, :, segment.tokens :] = 0
            return
        for run, columns in chunk.columns():
            heads[:, :, run] += product[:, :, columns]
        if chunk.extra:
            heads[:, :, -chunk.extra :] += product[:, :, -chunk.extra :]

    def empty_sums(self, like: Tensor) -> Tensor:
        """Return memory (B, N, K, D) for sums over queries, with zeros where chunks do not start them."""
        if self.scores.mask is None and not self.scores.extra:
            return empty_heads(like)
        return empty_heads(like).to(sum_dtype(like)).zero_()

    def multiply(self, v: Tensor) -> Tensor:
        """Return P V (B, N, T, D)."""
        output = empty_rows(self.q, v)
        for chunk, part in self.chunks():
            self.put_rows(output, chunk, multiply(self.read(chunk, part), chunk.select_keys(v)))
        return output

    def block_gradient(self, values: list[Tensor], d_outputs: list[Tensor], delta: Tensor) -> list[Tensor]:
        """Compute dS = P * (sum of dO_i V_i^T - delta), and from it all gradients of a block.

        The sum is one product, as the heads of all values lie side by side.
        """
        d_q = empty_heads(self.q)
        d_k = self.empty_sums(self.k)
        d_v = self.empty_sums(values[0])
        for chunk, part in self.chunks():
            probabilities = self.read(chunk, part)
            of_rows = [self.rows(d_output, chunk) for d_output in d_outputs]
            self.add_product(d_v, chunk, probabilities, of_rows[0])
            if self.additions:
                room = self.additions[0].room(chunk, self.q)
            else:
                room = scratch("scores", chunk.shape, self.q)
            columns = _side_by_side([chunk.select_keys(v) for v in values])
            d_scores = multiply(_side_by_side(of_rows), columns.mT, room)
            d_scores.sub_(self.rows(delta, chunk).unsqueeze(-1)).mul_(probabilities)
            if self.has_queries:
                product = multiply(d_scores, chunk.select_keys(self.k))
                self.put_rows(d_q, chunk, product.mul_(self.scale))
                self.add_product(d_k, chunk, d_scores, self.queries(chunk))
            for addition in self.additions:
                addition.add_gradient(chunk, d_scores)

        learned: dict[str, Tensor] = {}
        for addition in self.additions:
            learned |= addition.gradients()
        return [d_q, d_k.to(self.k.dtype), d_v.to(values[0].dtype), *learned_gradients(learned, self.q)]


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
        self.keeps_distribution = stores

    def _size(self, q: Tensor, k: Tensor, scores: Scores) -> int:
        if self.keeps_distribution:
            return Blockwise.stored_size(q, k, scores)
        return 0

    def saved_like(self, q: Tensor, k: Tensor, scores: Scores) -> Tensor:
        return q.new_empty(self._size(q, k, scores))

    def attend_forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return (P V, P if it is kept)."""
        stored = empty((self._size(q, k, scores),), q)
        distribution = Blockwise(q, k, scores, stored)
        output = empty_rows(q, v)
        for chunk, part in distribution.chunks():
            probabilities = distribution.compute(chunk, part)
            distribution.put_rows(output, chunk, multiply(probabilities, chunk.select_keys(v)))
        return output, stored

    def reuse_forward(self, q: Tensor, k: Tensor, v: Tensor, saved: Tensor, scores: Scores) -> Tensor:
        """Return P V."""
        return Blockwise(q, k, scores, saved).multiply(v)

    def value_gradient(self, q: Tensor, k: Tensor, d_output: Tensor, saved: Tensor, scores: Scores) -> Tensor:
        """Return P^T dO."""
        distribution = Blockwise(q, k, scores, saved)
        d_v = distribution.empty_sums(empty_rows(k, d_output))
        for chunk, part in distribution.chunks():
            rows = distribution.rows(d_output, chunk)
            distribution.add_product(d_v, chunk, distribution.read(chunk, part), rows)
        return d_v.to(d_output.dtype)

    def block_gradient(self, q, k, values, d_outputs, delta, saved, scores) -> list[Tensor]:
        """Return [dQ, dK, dV of the first values, and the gradients of ``scores.learned``]."""
        return Blockwise(q, k, scores, saved).block_gradient(values, d_outputs, delta)


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors, -1)


def sum_along_diagonals(padded: Tensor) -> Tensor:
    """Sum all (i, j) with i + j = d of rows that are each followed by R zeros.

    Args:
        padded: (H, R, K + R).

    Returns:
        (H, K + R - 1), by d. Entry (i, j) is number i (K + R) + j, and so entry (i, i + j) of rows one shorter.
    """
    heads, rows, width = padded.shape
    shorter = padded.flatten(1)[:, : rows * (width - 1)].view(heads, rows, width - 1)
    return shorter.sum(1, dtype=sum_dtype(padded))


def sum_dtype(like: Tensor) -> torch.dtype:
    """Return single precision or better, to sum in."""
    return torch.promote_types(like.dtype, torch.float32)
