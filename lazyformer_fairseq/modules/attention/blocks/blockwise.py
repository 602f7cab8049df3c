"""Attention piece by piece: a few heads or rows of the distribution at a time, as many as a processor's cache holds.

The four functions of :class:`~lazyformer_fairseq.modules.attention.block_kernels.BlockKernels`, in torch. With
``stored`` the distribution is kept (back end ``materialize``), without it each function computes it anew, and memory
grows with n alone (back end ``fused`` on a CPU). A GPU takes the whole distribution as one piece.

Where there is a relative bias, a piece has its rows in reverse order, the last query first. Then the bias of a piece is
a view of the biases by distance (row i is the window of T distances that starts at i), and its gradient is the sum
along another view.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention.block_kernels import empty_output
from lazyformer_fairseq.modules.attention.blocks import kept_memory

# Of a processor's piece: 8 MiB in single precision. 2^20 and 2^22 came out slower at 2,048 tokens, alike at 512.
PIECE_ELEMENTS = 2**21


class Piece(NamedTuple):
    """A part of the distribution, (sequences, heads, rows)."""

    sequences: slice
    heads: slice
    rows: slice


class _Distribution:
    """P by pieces: read where it is stored, else computed.

    Attributes:
        is_reversed: whether the rows of a piece are.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        table: Optional[Tensor],
        bucket_by_distance: Optional[Tensor],
        lengths: Optional[Tensor],
        stored: Optional[Tensor] = None,
    ):
        self.q = q
        self.k = k
        self.time = q.size(-2)
        self.scale = 1 / math.sqrt(q.size(-1))
        self.by_distance = None if table is None else table[bucket_by_distance].t().contiguous().to(q.dtype)
        self.is_reversed = table is not None
        self.lengths = lengths
        self.stored = stored

    def pieces(self) -> Iterator[Piece]:
        """All of them."""
        batch, heads, time, _ = self.q.shape
        if self.q.device.type != "cpu":
            yield Piece(slice(0, batch), slice(0, heads), slice(0, time))
            return
        rows = min(time, max(1, PIECE_ELEMENTS // time))
        several = max(1, PIECE_ELEMENTS // (time * rows)) if rows == time else 1
        for sequence in range(batch):
            for head in range(0, heads, several):
                for row in range(0, time, rows):
                    yield Piece(
                        slice(sequence, sequence + 1),
                        slice(head, min(heads, head + several)),
                        slice(row, min(time, row + rows)),
                    )

    def rows(self, x: Tensor, piece: Piece) -> Tensor:
        """Of x (B, N, T, ...) those of a piece, (sequences x heads, rows, ...), in the order that they have there."""
        x = x[piece].flatten(0, 1)
        return x.flip(1) if self.is_reversed else x

    def put_rows(self, out: Tensor, piece: Piece, rows: Tensor) -> None:
        """Writes what :meth:`rows` would read."""
        rows = rows.flip(1) if self.is_reversed else rows
        out[piece] = rows.view_as(out[piece])

    def queries(self, piece: Piece) -> Tensor:
        """Q / sqrt(D), in the piece's order."""
        return self.rows(self.q, piece) * self.scale

    def compute(self, piece: Piece, out: Optional[Tensor] = None) -> Tensor:
        """P of a piece, (sequences x heads, rows, T), into `out` if given."""
        q, k = self.queries(piece), _columns(self.k, piece).transpose(1, 2)
        out = kept_memory.scratch("probabilities", (*q.shape[:2], self.time), q) if out is None else out
        if self.by_distance is None:
            torch.bmm(q, k, out=out)
        else:
            windows = self.by_distance[piece.heads].unfold(-1, self.time, 1)[:, self.distances(piece.rows)]
            out.unflatten(0, (-1, windows.size(0))).copy_(windows)
            torch.baddbmm(out, q, k, out=out)
        self._mask_padding(out, piece.sequences)
        # Half precision goes through single inside; torch.exp with a row's log-sum-exp is 5 times slower on some CPUs.
        return torch.softmax(out, -1, out=out)

    def read(self, piece: Piece) -> Tensor:
        """As :meth:`compute`, from where it is stored if it is."""
        return self.compute(piece) if self.stored is None else self.stored[piece].flatten(0, 1)

    def distances(self, rows: slice) -> slice:
        """At which of the 2T - 1 distances the windows of these rows begin, the last row's first."""
        return slice(self.time - rows.stop, self.time - rows.start)

    def _mask_padding(self, scores: Tensor, sequences: slice) -> None:
        """-inf at keys that are padding. A processor's piece is of one sequence, whose length costs nothing to read."""
        if self.lengths is None:
            return
        lengths = self.lengths[sequences]
        if self.q.device.type == "cpu":
            scores[..., int(lengths) :] = float("-inf")
        else:
            is_padding = torch.arange(self.time, device=lengths.device) >= lengths[:, None]
            scores.unflatten(0, (lengths.size(0), -1)).masked_fill_(is_padding[:, None, None], float("-inf"))


def attend_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Optional[Tensor],
    bucket_by_distance: Optional[Tensor],
    far: int,
    lengths: Optional[Tensor],
    store: bool,
) -> tuple[Tensor, Tensor]:
    """Output (B, N, T, D), and P (B, N, T, T) in the pieces' order if it is to be stored, else nothing (0,)."""
    distribution = _Distribution(q, k, table, bucket_by_distance, lengths)
    time = distribution.time
    stored = kept_memory.empty((*q.shape[:2], time, time), q) if store else q.new_empty(0)
    output = empty_output(v)
    for piece in distribution.pieces():
        probabilities = distribution.compute(piece, stored[piece].flatten(0, 1) if store else None)
        distribution.put_rows(output, piece, torch.bmm(probabilities, _columns(v, piece)))
    return output, stored


def reuse_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Tensor,
    table: Optional[Tensor],
    bucket_by_distance: Optional[Tensor],
    far: int,
    lengths: Optional[Tensor],
) -> Tensor:
    """P V (B, N, T, D)."""
    distribution = _Distribution(q, k, table, bucket_by_distance, lengths, saved if saved.numel() else None)
    output = empty_output(v)
    for piece in distribution.pieces():
        distribution.put_rows(output, piece, torch.bmm(distribution.read(piece), _columns(v, piece)))
    return output


def value_gradient(
    q: Tensor,
    k: Tensor,
    d_output: Tensor,
    saved: Tensor,
    table: Optional[Tensor],
    bucket_by_distance: Optional[Tensor],
    far: int,
    lengths: Optional[Tensor],
) -> Tensor:
    """P^T dO (B, N, T, D)."""
    distribution = _Distribution(q, k, table, bucket_by_distance, lengths, saved if saved.numel() else None)
    d_v = empty_output(d_output)
    for piece in distribution.pieces():
        _add_product(d_v, piece, distribution.read(piece), distribution.rows(d_output, piece))
    return d_v


def block_gradient(
    q: Tensor,
    k: Tensor,
    values: list[Tensor],
    d_outputs: list[Tensor],
    delta: Tensor,
    saved: Tensor,
    table: Optional[Tensor],
    bucket_by_distance: Optional[Tensor],
    far: int,
    lengths: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV of the first values, and d table ((0,) without one): one pass for all layers that share P.

    dS = P * (sum of dO_i V_i^T - delta); the sum is one product, as the heads of all values stand side by side.
    """
    distribution = _Distribution(q, k, table, bucket_by_distance, lengths, saved if saved.numel() else None)
    d_q, d_k, d_v = empty_output(q), empty_output(q), empty_output(q)
    d_by_distance = None if table is None else torch.zeros_like(distribution.by_distance, dtype=_sum_dtype(q))
    for piece in distribution.pieces():
        probabilities = distribution.read(piece)
        of_rows = [distribution.rows(d_output, piece) for d_output in d_outputs]
        _add_product(d_v, piece, probabilities, of_rows[0])
        # A row of scores has room for a row of zeros behind it, see _sum_along_diagonals.
        room = 0 if table is None else of_rows[0].size(1)
        padded = kept_memory.scratch("scores", (*probabilities.shape[:2], distribution.time + room), q)
        d_scores = padded[..., : distribution.time]
        torch.bmm(_side_by_side(of_rows), _side_by_side([_columns(v, piece) for v in values]).mT, out=d_scores)
        d_scores.sub_(distribution.rows(delta, piece).unsqueeze(-1)).mul_(probabilities)
        distribution.put_rows(d_q, piece, torch.bmm(d_scores, _columns(k, piece)).mul_(distribution.scale))
        _add_product(d_k, piece, d_scores, distribution.queries(piece))
        if d_by_distance is not None:
            padded[..., distribution.time :] = 0
            sums = _sum_along_diagonals(padded).unflatten(0, (-1, d_by_distance[piece.heads].size(0))).sum(0)
            first = distribution.distances(piece.rows).start
            d_by_distance[piece.heads, first : first + sums.size(-1)] += sums
    d_table = q.new_empty(0)
    if d_by_distance is not None:
        d_table = torch.zeros_like(table, dtype=d_by_distance.dtype)
        d_table = d_table.index_add_(0, bucket_by_distance, d_by_distance.t()).to(table.dtype)
    return d_q, d_k, d_v, d_table


def _columns(x: Tensor, piece: Piece) -> Tensor:
    """Of x (B, N, T, D) the sequences and heads of a piece as one dimension; a view where there is one sequence."""
    return x[piece.sequences, piece.heads].flatten(0, 1)


def _add_product(total: Tensor, piece: Piece, probabilities: Tensor, rows: Tensor) -> None:
    """total += P^T rows, where the piece's heads are; its first rows begin the sum."""
    product = torch.bmm(probabilities.transpose(1, 2), rows)
    heads = total[piece.sequences, piece.heads]
    product = product.view_as(heads)
    if piece.rows.start:
        heads.add_(product)
    else:
        heads.copy_(product)


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


def _sum_dtype(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _sum_along_diagonals(padded: Tensor) -> Tensor:
    """(H, R, T + R), each row followed by R zeros -> (H, T + R - 1): entry d the sum of all (i, j) with i + j = d.

    Entry (i, j) is number i (T + R) + j, and so entry (i, i + j) of rows that are one shorter.
    """
    heads, rows, width = padded.shape
    return padded.flatten(1)[:, : rows * (width - 1)].view(heads, rows, width - 1).sum(1, dtype=_sum_dtype(padded))
