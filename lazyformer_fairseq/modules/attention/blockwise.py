"""Attention piece by piece: some sequences, heads or rows of the distribution at a time, as many as a cache holds.

Back end ``materialize`` keeps the distribution, ``fused`` on a processor computes it anew in each function, and memory
grows with n alone. A GPU takes the whole distribution as one piece.

What depends on distances is a view of something smaller. Where there is a relative bias, a piece has its rows in
reverse order, the last query first: then row i of the bias is the window of K distances that starts at i, and its
gradient is the sum along another view. Transformer-XL's positions give scores by query and distance, of which the
scores by query and key are a view (:func:`~lazyformer_fairseq.modules.attention.scores.relative_shift`). Pieces skip
keys that lie in the future of all their queries.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention import pieces
from lazyformer_fairseq.modules.attention.lazy_block import empty_heads, learned_gradients
from lazyformer_fairseq.modules.attention.scores import Scores, relative_shift
from lazyformer_fairseq.modules.memory_costs import SINGLE, AttentionSize, Memory
from lazyformer_fairseq.modules.products import multiply

# Features of scores that these lack: they compute every score of softmax(QK^T / sqrt(D) + additions).
LACKS = frozenset({"mask", "extra", "entmax"})
# Size of a processor's piece: 8 MiB in single precision. 2^20 and 2^22 are slower at 2,048 tokens, alike at 512.
PIECE_ELEMENTS = 2**21
# Sequences whose distributions are smaller share a piece: their products are too short to pay for a call each, and
# worth the copy that puts heads side by side.
WORTH_A_PIECE = 2**19


class Piece(NamedTuple):
    """A part of the distribution, (sequences, heads, rows); no query of it sees a key beyond `keys`."""

    sequences: slice
    heads: slice
    rows: slice
    keys: int

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        return self.sequences, self.heads, self.rows

    @property
    def shape(self) -> tuple[int, int, int]:
        """(sequences x heads, rows, keys)."""
        sequences, heads, rows = (part.stop - part.start for part in self.queries)
        return sequences * heads, rows, self.keys


class Dense:
    """Learned scores of every query and key: (B, N, T, K), or (1, N, T, K) for all sequences alike."""

    def __init__(self, learned: Tensor, batch: int, is_reversed: bool):
        self.learned = learned
        self.is_shared = learned.size(0) < batch
        self.is_reversed = is_reversed
        self.gradient: Optional[Tensor] = None

    def _part(self, x: Tensor, piece: Piece) -> Tensor:
        """A piece's part of x, (sequences or 1, heads, rows, K)."""
        return x[slice(None) if self.is_shared else piece.sequences, piece.heads, piece.rows]

    def view(self, piece: Piece) -> Tensor:
        """(sequences or 1, heads, rows, keys), in the piece's order."""
        part = self._part(self.learned, piece)[..., : piece.keys]
        return part.flip(-2) if self.is_reversed else part

    def room(self, piece: Piece, like: Tensor) -> Tensor:
        """Memory for dS of a piece: that of the gradient, where no other piece adds to it."""
        part = self._part(self._sums(), piece)
        has_gaps = part.size(0) > 1 and part.size(1) < self.learned.size(1)  # between sequences, for other heads
        if self.is_shared or self.is_reversed or has_gaps:
            return pieces.scratch("scores", piece.shape, like)
        return part.view(-1, *part.shape[2:])[..., : piece.keys]

    def add_gradient(self, piece: Piece, d_scores: Tensor) -> None:
        """Adds dS of a piece, which may stand in :meth:`room`."""
        part = self._part(self._sums(), piece)
        seen, hidden = part[..., : piece.keys], part[..., piece.keys :]
        found = d_scores.flip(1) if self.is_reversed else d_scores
        found = found.unflatten(0, (-1, part.size(1)))
        found = found.sum(0, keepdim=True) if found.size(0) > seen.size(0) else found
        if self.is_shared and piece.sequences.start:
            seen += found
        else:
            hidden.zero_()
            if found.data_ptr() != seen.data_ptr():
                seen.copy_(found)

    def _sums(self) -> Tensor:
        """Memory for the gradient; over several sequences it sums in single precision or better."""
        if self.gradient is None:
            dtype = pieces.sum_dtype(self.learned) if self.is_shared else self.learned.dtype
            self.gradient = pieces.empty(self.learned.shape, self.learned.new_empty((), dtype=dtype))
        return self.gradient

    def gradients(self) -> dict[int, Tensor]:
        """By their number in ``scores.learned``."""
        return {4: self._sums().to(self.learned.dtype)}


class Bias(pieces.BiasByDistance):
    """A learned bias by distance. A piece sees a view of it: row i, the last query first, is the window at i."""

    def __init__(self, scores: Scores, q: Tensor, k: Tensor):
        super().__init__(scores, q)
        self.time = q.size(-2)

    def view(self, piece: Piece) -> Tensor:
        """(heads, rows, keys), for every sequence alike."""
        return self.by_distance[piece.heads].unfold(-1, piece.keys, 1)[:, self._windows(piece)]

    def _windows(self, piece: Piece) -> slice:
        """Where, among the K + T - 1 distances, the rows' windows begin."""
        return slice(self.time - piece.rows.stop, self.time - piece.rows.start)

    def room(self, piece: Piece, like: Tensor) -> Tensor:
        """Scratch memory for dS of a piece; each row leaves room for zeros behind it, see sum_along_diagonals."""
        groups, rows, keys = piece.shape
        self.padded = pieces.scratch("scores", (groups, rows, keys + rows), like)
        return self.padded[..., :keys]

    def add_gradient(self, piece: Piece, d_scores: Tensor) -> None:
        """Adds the gradient of dS, which stands in :meth:`room`."""
        self.padded[..., piece.keys :] = 0
        total = self.gradient[piece.heads]
        sums = pieces.sum_along_diagonals(self.padded).unflatten(0, (-1, total.size(0))).sum(0)
        first = self._windows(piece).start
        total[:, first : first + sums.size(-1)] += sums


class Positions:
    """Transformer-XL's positions: scores by query and distance, of which those by query and key are a view."""

    def __init__(self, scores: Scores, q: Tensor, k: Tensor):
        self.position_queries, self.all_distances = scores.position_queries_BNTD, scores.distances_NKD
        self.keys = k.size(-2)
        self.d_queries = torch.empty_like(self.position_queries)
        self.d_distances = torch.zeros_like(self.all_distances)

    def _queries(self, piece: Piece) -> Tensor:
        return self.position_queries[piece.queries].flatten(0, 1)

    def _distances(self, piece: Piece) -> Tensor:
        """A piece's distances, (sequences x heads, keys + 1, D)."""
        found = self.all_distances[piece.heads, self.keys - piece.keys :]
        return found.repeat(piece.sequences.stop - piece.sequences.start, 1, 1)

    def view(self, piece: Piece) -> Tensor:
        """(sequences x heads, rows, keys)."""
        groups, rows, keys = piece.shape
        by_distance = pieces.scratch("by_distance", (groups, rows, keys + 1), self.position_queries)
        torch.bmm(self._queries(piece), self._distances(piece).transpose(1, 2), out=by_distance)
        return relative_shift(by_distance)

    def room(self, piece: Piece, like: Tensor) -> Tensor:
        """Scratch memory for dS of a piece: a view of dS by distance."""
        groups, rows, keys = piece.shape
        self.by_distance = pieces.scratch("scores", (groups, rows, keys + 1), like)
        flat = self.by_distance.flatten(1)
        flat[:, : rows - 1] = 0
        flat[:, rows - 1 + rows * keys :] = 0
        return relative_shift(self.by_distance)

    def add_gradient(self, piece: Piece, d_scores: Tensor) -> None:
        """Adds the gradient of dS, which stands in :meth:`room`."""
        d_queries = torch.bmm(self.by_distance, self._distances(piece))
        self.d_queries[piece.queries] = d_queries.view_as(self.d_queries[piece.queries])
        total = self.d_distances[piece.heads, self.keys - piece.keys :]
        product = torch.bmm(self.by_distance.transpose(1, 2), self._queries(piece))
        total += product.unflatten(0, (-1, total.size(0))).sum(0)

    def gradients(self) -> dict[int, Tensor]:
        """By their number in ``scores.learned``."""
        return {1: self.d_queries, 2: self.d_distances}


def _piece_size(heads: int, time: int, keys: int) -> tuple[int, int, int]:
    """Sequences, heads and rows of a processor's piece, at most."""
    rows = min(time, max(1, PIECE_ELEMENTS // keys))
    if rows < time:
        return 1, 1, rows
    size = rows * keys  # of a head's part of a piece
    return max(1, WORTH_A_PIECE // (heads * size)), min(heads, max(1, PIECE_ELEMENTS // size)), rows


class Blockwise(pieces.Distribution):
    """All of P. At most one of bias and positions is added to the products of queries and keys, and dense scores."""

    def __init__(self, q: Tensor, k: Tensor, scores: Scores, stored: Optional[Tensor] = None):
        super().__init__(q, k, scores, stored)
        self.time, self.keys = q.size(-2), k.size(-2)
        self.has_queries = q.size(-1) > 0
        self.is_reversed = scores.table_KN is not None
        self.additions = []
        if self.is_reversed:
            self.additions.append(Bias(scores, q, k))
        elif scores.position_queries_BNTD is not None:
            self.additions.append(Positions(scores, q, k))
        if scores.learned_BNTK is not None:
            self.additions.append(Dense(scores.learned_BNTK, q.size(0), self.is_reversed))
        # Nothing to add, to multiply or to mask: softmax may read them where they stand.
        is_alone = not self.has_queries and scores.features == {"learned"}
        self.is_only_dense = is_alone and scores.learned_BNTK.dtype == q.dtype

    @classmethod
    def stored_size(cls, q: Tensor, k: Tensor, scores: Scores) -> int:
        """Causal ones leave some unused."""
        batch, heads, time, _ = q.shape
        return batch * heads * time * k.size(-2)

    def cut(self) -> Iterator[Piece]:
        batch, heads, time, _ = self.q.shape
        if self.q.device.type != "cpu":
            yield Piece(slice(0, batch), slice(0, heads), slice(0, time), self.keys)
            return
        at_once, several, rows = _piece_size(heads, time, self.keys)
        for sequence in range(0, batch, at_once):
            for head in range(0, heads, several):
                for row in range(0, time, rows):
                    last = min(time, row + rows)
                    yield Piece(
                        slice(sequence, min(batch, sequence + at_once)),
                        slice(head, min(heads, head + several)),
                        slice(row, last),
                        self.keys - time + last if self.scores.is_causal else self.keys,
                    )

    def rows(self, x: Tensor, piece: Piece) -> Tensor:
        """(sequences x heads, rows, ...), in the piece's order."""
        x = x[piece.queries].flatten(0, 1)
        return x.flip(1) if self.is_reversed else x

    def put_rows(self, out: Tensor, piece: Piece, rows: Tensor) -> None:
        rows = rows.flip(1) if self.is_reversed else rows
        out[piece.queries] = rows.view_as(out[piece.queries])

    def queries(self, piece: Piece) -> Tensor:
        """Q / sqrt(D), in the piece's order."""
        return self.rows(self.q, piece) * self.scale

    def compute(self, piece: Piece, out: Optional[Tensor] = None) -> Tensor:
        q, k = self.queries(piece), _columns(self.k, piece).transpose(1, 2)
        out = pieces.scratch("probabilities", piece.shape, q) if out is None else out
        if self.is_only_dense and math.prod(piece.shape) == (scores := self.additions[-1].view(piece)).numel():
            return torch.softmax(scores.reshape(piece.shape), -1, out=out)
        for number, addition in enumerate(self.additions):
            added = addition.view(piece)
            here = out.unflatten(0, (-1, added.size(-3)))
            here.add_(added) if number else here.copy_(added)
        if self.has_queries or not self.additions:
            multiply(q, k, out, adds=bool(self.additions))
        self._mask_padding(out, piece)
        self._mask_future(out, piece)
        # Half precision goes through single inside; torch.exp with a row's log-sum-exp is 5 times slower on some CPUs.
        return torch.softmax(out, -1, out=out)

    def combine(self, piece: Piece, probabilities: Tensor, v: Tensor) -> Tensor:
        return multiply(probabilities, _columns(v, piece))

    def sums(self, like: Tensor) -> Tensor:
        return like

    def add_product(self, total: Tensor, piece: Piece, probabilities: Tensor, rows: Tensor) -> None:
        """At the piece's heads; the first rows of a head start the sum."""
        product = multiply(probabilities.transpose(1, 2), rows)
        heads = total[piece.sequences, piece.heads]
        seen = heads[..., : piece.keys, :]
        if piece.rows.start:
            seen.add_(product.view_as(seen))
        else:
            seen.copy_(product.view_as(seen))
            heads[..., piece.keys :, :] = 0

    def block_gradient(self, values: list[Tensor], d_outputs: list[Tensor], delta: Tensor) -> list[Tensor]:
        """dS = P * (sum of dO_i V_i^T - delta); the sum is one product, as the heads of all values lie side by side."""
        d_q, d_k, d_v = empty_heads(self.q), empty_heads(self.k), empty_heads(values[0])
        for piece, part in self.pieces():
            probabilities = self.read(piece, part)
            of_rows = [self.rows(d_output, piece) for d_output in d_outputs]
            self.add_product(d_v, piece, probabilities, of_rows[0])
            room = (
                self.additions[0].room(piece, self.q)
                if self.additions
                else pieces.scratch("scores", piece.shape, self.q)
            )
            columns = _side_by_side([_columns(v, piece) for v in values])
            d_scores = multiply(_side_by_side(of_rows), columns.mT, room)
            d_scores.sub_(self.rows(delta, piece).unsqueeze(-1)).mul_(probabilities)
            if self.has_queries:
                self.put_rows(d_q, piece, multiply(d_scores, _columns(self.k, piece)).mul_(self.scale))
                self.add_product(d_k, piece, d_scores, self.queries(piece))
            for each in self.additions:
                each.add_gradient(piece, d_scores)
        found = {number: gradient for each in self.additions for number, gradient in each.gradients().items()}
        return [d_q, d_k, d_v, *learned_gradients(found, self.q)]

    def _mask_padding(self, scores: Tensor, piece: Piece) -> None:
        """-inf at keys that are padding. On a processor, reading one sequence's length costs nothing."""
        lengths, first, last = self.scores.lengths_B, piece.sequences.start, piece.sequences.stop
        if lengths is not None and self.q.device.type == "cpu" and last - first == 1:
            scores[..., int(lengths[first]) :] = float("-inf")
        elif (is_padding := self.scores.is_padding(self.keys)) is not None:
            here = is_padding[piece.sequences, None, None, : piece.keys]
            scores.unflatten(0, (last - first, -1)).masked_fill_(here, float("-inf"))

    def _mask_future(self, scores: Tensor, piece: Piece) -> None:
        """-inf at keys after the query."""
        if not self.scores.is_causal:
            return
        first = self.keys - self.time + piece.rows.start  # the key at the place of the piece's first query
        is_future = torch.ones(piece.shape[1], piece.keys - first, dtype=torch.bool, device=scores.device).triu(1)
        scores[..., first:].masked_fill_(is_future.flip(0) if self.is_reversed else is_future, float("-inf"))


STORING, COMPUTING = pieces.ByPieces(Blockwise, store=True), pieces.ByPieces(Blockwise, store=False)


def _columns(x: Tensor, piece: Piece) -> Tensor:
    """A piece's keys of x (B, N, K, D): (sequences x heads, keys, D); a view where there is one sequence."""
    return x[piece.sequences, piece.heads, : piece.keys].flatten(0, 1)


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


def count_memory(size: AttentionSize, store: bool) -> Memory:
    """Of an ``s``, besides queries, keys, values and output."""
    piece, rows = _count_piece(size)
    of_piece = int(4 * size.queries * piece / size.pairs)
    # dS behind a bias leaves as many zeros as rows, see Bias.room; positions compute scores by distance besides.
    d_scores = piece * (size.keys + rows) // size.keys if "bias" in size.features else piece
    by_distance = piece if "positions" in size.features else 0
    scratch, more_scratch = (by_distance + (0 if store else piece)) * size.number, d_scores * size.number
    if size.number < SINGLE and size.device == "cpu":  # what torch subtracts there from half precision, it converts
        of_piece = max(of_piece, 2 * piece * SINGLE)
    backward = size.queries + 2 * size.values + size.batch * size.time * size.width * SINGLE + size.rows * SINGLE
    pending = size.consumers * (size.queries + size.values)
    kept = size.pairs * size.number if store else 0
    if size.device == "cpu":
        return Memory(kept, of_piece, backward + of_piece, pending, scratch, more_scratch)
    return Memory(kept, scratch + of_piece, backward + of_piece + scratch + more_scratch, pending)


def count_reuse_memory(size: AttentionSize, store: bool) -> Memory:
    """Of an ``l``, besides values and output."""
    piece, _ = _count_piece(size)
    of_piece = int(2 * size.queries * piece / size.pairs)
    computed = 0 if store or size.device == "cpu" else piece * size.number
    return Memory(0, of_piece + computed, size.queries + size.values + of_piece + computed)


def _count_piece(size: AttentionSize) -> tuple[int, int]:
    """Numbers and rows of a piece."""
    if size.device != "cpu":
        return size.pairs, size.time
    at_once, several, rows = _piece_size(size.heads, size.time, size.keys)
    return min(size.batch, at_once) * several * rows * size.keys, rows
