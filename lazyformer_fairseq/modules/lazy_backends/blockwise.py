"""Attention block by block: a few heads or rows of the distribution at a time, as many as a processor's cache holds.

The four functions of :class:`~lazyformer_fairseq.modules.lazy_backends.block_kernels.BlockKernels`, in torch. With
``stored`` the distribution is kept (back end ``materialize``), without it each function computes it anew, and memory
grows with n alone (back end ``fused`` on a CPU). A GPU takes the whole distribution as one block.

Rows stand in reverse order, the last query first. Then a block of the relative bias is a view of the biases by distance
(row i is the window of T distances that starts at i), and its gradient is the sum along another view.
"""

import math
from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.lazy_backends import kept_memory
from lazyformer_fairseq.modules.lazy_backends.block_kernels import empty_output

# Of a processor's block: 8 MiB in single precision. 2^20 and 2^22 came out slower at 2,048 tokens, alike at 512.
BLOCK_ELEMENTS = 2**21


class _Scores:
    """Makes the blocks of the distribution P, rows reversed."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        table: Optional[Tensor],
        bucket_by_distance: Optional[Tensor],
        lengths: Optional[Tensor],
        stored: Optional[Tensor] = None,
    ):
        self.q = q.flip(-2) / math.sqrt(q.size(-1))
        self.k = k
        self.time = q.size(-2)
        self.by_distance = None if table is None else table[bucket_by_distance].t().contiguous().to(q.dtype)
        self.lengths = lengths
        self.stored = stored

    def blocks(self) -> Iterator[tuple[slice, slice, slice]]:
        """Which sequences, heads and (reversed) rows to take at a time."""
        batch, heads, time, _ = self.q.shape
        if self.q.device.type != "cpu":
            yield slice(0, batch), slice(0, heads), slice(0, time)
            return
        rows = min(time, max(1, BLOCK_ELEMENTS // time))
        several = max(1, BLOCK_ELEMENTS // (time * rows)) if rows == time else 1
        for sequence in range(batch):
            for head in range(0, heads, several):
                for row in range(0, time, rows):
                    yield (
                        slice(sequence, sequence + 1),
                        slice(head, min(heads, head + several)),
                        slice(row, min(time, row + rows)),
                    )

    def probabilities(self, block: tuple[slice, slice, slice], out: Optional[Tensor] = None) -> Tensor:
        """P of a block, (sequences x heads, rows, T): read where it is stored, else computed, into `out` if given."""
        if self.stored is not None:
            return self.stored[block].flatten(0, 1)
        sequences, heads, rows = block
        q, k = _flat(self.q[block]), _flat(self.k[sequences, heads])
        out = q.new_empty(*q.shape[:2], self.time) if out is None else out
        if self.by_distance is None:
            torch.bmm(q, k.transpose(1, 2), out=out)
        else:
            windows = self.by_distance[heads].unfold(-1, self.time, 1)[:, rows]
            several = q.size(0) // windows.size(0)
            torch.baddbmm(windows if several == 1 else windows.repeat(several, 1, 1), q, k.transpose(1, 2), out=out)
        self._mask_padding(out, sequences)
        # Half precision goes through single inside; torch.exp with a row's log-sum-exp is 5 times slower on some CPUs.
        return torch.softmax(out, -1, out=out)

    def _mask_padding(self, scores: Tensor, sequences: slice) -> None:
        """-inf at keys that are padding. A processor's block is of one sequence, whose length costs nothing to read."""
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
    """Output (B, N, T, D), and P (B, N, T, T) with rows reversed if it is to be stored, else nothing (0,)."""
    scores = _Scores(q, k, table, bucket_by_distance, lengths)
    stored = kept_memory.empty((*q.shape[:2], scores.time, scores.time), q) if store else q.new_empty(0)
    output = empty_output(v)
    for block in scores.blocks():
        probabilities = scores.probabilities(block, stored[block].flatten(0, 1) if store else None)
        output[block] = torch.bmm(probabilities, _flat(v[block[:2]])).view_as(output[block])
    return output.flip(-2), stored


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
    scores = _Scores(q, k, table, bucket_by_distance, lengths, saved if saved.numel() else None)
    output = empty_output(v)
    for block in scores.blocks():
        output[block] = torch.bmm(scores.probabilities(block), _flat(v[block[:2]])).view_as(output[block])
    return output.flip(-2)


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
    scores = _Scores(q, k, table, bucket_by_distance, lengths, saved if saved.numel() else None)
    d_output = d_output.flip(-2)
    d_v = empty_output(d_output).zero_()
    for block in scores.blocks():
        _add_product(d_v[block[:2]], scores.probabilities(block), _flat(d_output[block]))
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
    scores = _Scores(q, k, table, bucket_by_distance, lengths, saved if saved.numel() else None)
    all_values, all_d_outputs = torch.cat(values, -1), torch.cat([d.flip(-2) for d in d_outputs], -1)
    d_first, delta = d_outputs[0].flip(-2), delta.flip(-1)
    d_q, d_k, d_v = empty_output(q), empty_output(q).zero_(), empty_output(q).zero_()
    d_by_distance = None if table is None else torch.zeros_like(scores.by_distance, dtype=_sum_dtype(q))
    for block in scores.blocks():
        sequences, heads, rows = block
        probabilities = scores.probabilities(block)
        _add_product(d_v[sequences, heads], probabilities, _flat(d_first[block]))
        # A row of scores has room for a row of zeros behind it, see _sum_along_diagonals.
        room = 0 if table is None else rows.stop - rows.start
        padded = q.new_zeros(*probabilities.shape[:2], scores.time + room)
        d_scores = padded[..., : scores.time]
        torch.bmm(_flat(all_d_outputs[block]), _flat(all_values[sequences, heads]).transpose(1, 2), out=d_scores)
        d_scores.sub_(_flat(delta[block]).unsqueeze(-1)).mul_(probabilities)
        d_q[block] = torch.bmm(d_scores, _flat(k[sequences, heads])).view_as(d_q[block])
        _add_product(d_k[sequences, heads], d_scores, _flat(scores.q[block]))
        if d_by_distance is not None:
            sums = _sum_along_diagonals(padded).to(d_by_distance.dtype)
            sums = sums.unflatten(0, (-1, heads.stop - heads.start)).sum(0)
            d_by_distance[heads, rows.start : rows.start + sums.size(-1)] += sums
    d_table = q.new_empty(0)
    if d_by_distance is not None:
        d_table = torch.zeros_like(table, dtype=d_by_distance.dtype)
        d_table = d_table.index_add_(0, bucket_by_distance, d_by_distance.t()).to(table.dtype)
    return d_q.flip(-2).div_(math.sqrt(q.size(-1))), d_k, d_v, d_table


def _flat(x: Tensor) -> Tensor:
    """Sequences and heads as one dimension; a view where there is one sequence, as in a processor's blocks."""
    return x.flatten(0, 1)


def _add_product(total: Tensor, rows: Tensor, others: Tensor) -> None:
    """total += rows^T others."""
    total += torch.bmm(rows.transpose(1, 2), others).view_as(total)


def _sum_dtype(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _sum_along_diagonals(padded: Tensor) -> Tensor:
    """(H, R, T + R), each row followed by R zeros -> (H, T + R - 1): entry d the sum of all (i, j) with i + j = d.

    Entry (i, j) is number i (T + R) + j, and so entry (i, i + j) of rows that are one shorter.
    """
    heads, rows, width = padded.shape
    return padded.flatten(1)[:, : rows * (width - 1)].view(heads, rows, width - 1).sum(1, dtype=_sum_dtype(padded))
