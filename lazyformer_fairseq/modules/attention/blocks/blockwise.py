"""Attention piece by piece: some sequences, heads or rows of the distribution at a time, as many as a cache holds.

The four functions of :class:`~lazyformer_fairseq.modules.attention.block_kernels.BlockKernels`, in torch. With
``store`` they keep the distribution (back end ``materialize``); without it each function recomputes it, and memory
grows with n alone (back end ``fused`` on a CPU). A GPU takes the whole distribution as one piece.

What depends on distances is a view of something smaller. Where there is a relative bias, a piece has its rows in
reverse order, the last query first: then row i of the bias is the window of K distances that starts at i, and its
gradient is the sum along another view. Transformer-XL's positions give scores by query and distance, of which the
scores by query and key are a view (:func:`~lazyformer_fairseq.modules.attention.scores.relative_shift`). Pieces skip
keys that lie in the future of all their queries.
"""

import functools
import math
from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention.block_kernels import (
    BlockKernels,
    as_operators,
    empty_heads,
    empty_rows,
    missing_gradients,
    with_stored,
)
from lazyformer_fairseq.modules.attention.blocks import kept_memory
from lazyformer_fairseq.modules.attention.blocks.additions import Bias, Dense, Piece, added_by_distance
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.memory_costs import SINGLE, AttentionSize, Memory

# Features of scores that these lack: they compute every score of softmax(QK^T / sqrt(D) + additions).
LACKS = frozenset({"mask", "extra", "entmax"})
# Size of a processor's piece: 8 MiB in single precision. 2^20 and 2^22 are slower at 2,048 tokens, alike at 512.
PIECE_ELEMENTS = 2**21
# Sequences whose distributions are smaller share a piece: their products are too short to pay for a call each, and
# worth the copy that puts heads side by side.
WORTH_A_PIECE = 2**19


def stored_size(q: Tensor, k: Tensor) -> int:
    """How many numbers a stored distribution takes; causal ones leave some unused."""
    batch, heads, time, _ = q.shape
    return batch * heads * time * k.size(-2)


def _piece_size(heads: int, time: int, keys: int) -> tuple[int, int, int]:
    """Sequences, heads and rows of a processor's piece, at most."""
    rows = min(time, max(1, PIECE_ELEMENTS // keys))
    if rows < time:
        return 1, 1, rows
    size = rows * keys  # of a head's part of a piece
    return max(1, WORTH_A_PIECE // (heads * size)), min(heads, max(1, PIECE_ELEMENTS // size)), rows


class _Distribution:
    """P by pieces: read if it is stored, else computed."""

    def __init__(self, q: Tensor, k: Tensor, scores: Scores, stored: Optional[Tensor] = None):
        self.q = q
        self.k = k
        self.time, self.keys = q.size(-2), k.size(-2)
        self.has_queries = q.size(-1) > 0
        self.scale = 1 / math.sqrt(max(1, q.size(-1)))
        self.scores = scores
        self.stored = stored if stored is None or stored.numel() else None
        self.added = added_by_distance(scores, q, k)
        self.is_reversed = isinstance(self.added, Bias)
        dense = None if scores.learned_BNTK is None else Dense(scores.learned_BNTK, q.size(0), self.is_reversed)
        self.dense = dense
        self.additions = [each for each in (self.added, dense) if each is not None]
        # Nothing to add, to multiply or to mask: softmax may read them where they stand.
        self.is_only_dense = not self.has_queries and scores.features == {"learned"} and dense.learned.dtype == q.dtype

    def pieces(self) -> Iterator[tuple[Piece, Optional[Tensor]]]:
        """All pieces, each with its part of the stored distribution."""
        return with_stored(self._pieces(), self.stored)

    def _pieces(self) -> Iterator[Piece]:
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
        """A piece's rows of x (B, N, T, ...): (sequences x heads, rows, ...), in the piece's order."""
        x = x[piece.queries].flatten(0, 1)
        return x.flip(1) if self.is_reversed else x

    def put_rows(self, out: Tensor, piece: Piece, rows: Tensor) -> None:
        """Writes what :meth:`rows` would read."""
        rows = rows.flip(1) if self.is_reversed else rows
        out[piece.queries] = rows.view_as(out[piece.queries])

    def queries(self, piece: Piece) -> Tensor:
        """Q / sqrt(D), in the piece's order."""
        return self.rows(self.q, piece) * self.scale

    def read(self, piece: Piece, stored: Optional[Tensor]) -> Tensor:
        """P of a piece, (sequences x heads, rows, keys), read if stored, else computed."""
        return self.compute(piece) if stored is None else stored

    def compute(self, piece: Piece, out: Optional[Tensor] = None) -> Tensor:
        """P of a piece, into `out` if given."""
        q, k = self.queries(piece), _columns(self.k, piece).transpose(1, 2)
        out = kept_memory.scratch("probabilities", piece.shape, q) if out is None else out
        if self.is_only_dense and math.prod(piece.shape) == (scores := self.dense.view(piece)).numel():
            return torch.softmax(scores.reshape(piece.shape), -1, out=out)
        for number, addition in enumerate(self.additions):
            added = addition.view(piece)
            here = out.unflatten(0, (-1, added.size(-3)))
            here.add_(added) if number else here.copy_(added)
        if not self.additions:
            torch.bmm(q, k, out=out)
        elif self.has_queries:
            torch.baddbmm(out, q, k, out=out)
        self._mask_padding(out, piece)
        self._mask_future(out, piece)
        # Half precision goes through single inside; torch.exp with a row's log-sum-exp is 5 times slower on some CPUs.
        return torch.softmax(out, -1, out=out)

    def room(self, piece: Piece) -> Tensor:
        """Memory for dS of a piece."""
        if self.additions:
            return self.additions[0].room(piece, self.q)
        return kept_memory.scratch("scores", piece.shape, self.q)

    def gradients(self) -> list[Tensor]:
        """Gradients of ``scores.learned``."""
        missing = missing_gradients(self.q, 5)
        by_distance = missing[:3] if self.added is None else self.added.gradients()
        return [*by_distance, missing[3], missing[4] if self.dense is None else self.dense.gradients()]

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


def attend_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, store: bool) -> tuple[Tensor, Tensor]:
    """Output (B, N, T, D), and P piece by piece with `store`, else nothing (0,)."""
    stored = kept_memory.empty((stored_size(q, k),), q) if store else q.new_empty(0)
    distribution = _Distribution(q, k, scores, stored)
    output = empty_rows(q, v)
    for piece, part in distribution.pieces():
        distribution.put_rows(output, piece, torch.bmm(distribution.compute(piece, part), _columns(v, piece)))
    return output, stored


def reuse_forward(q: Tensor, k: Tensor, v: Tensor, saved: Tensor, scores: Scores) -> Tensor:
    """P V (B, N, T, D)."""
    distribution = _Distribution(q, k, scores, saved)
    output = empty_rows(q, v)
    for piece, part in distribution.pieces():
        distribution.put_rows(output, piece, torch.bmm(distribution.read(piece, part), _columns(v, piece)))
    return output


def value_gradient(q: Tensor, k: Tensor, d_output: Tensor, saved: Tensor, scores: Scores) -> Tensor:
    """P^T dO (B, N, K, D)."""
    distribution = _Distribution(q, k, scores, saved)
    d_v = empty_rows(k, d_output)
    for piece, part in distribution.pieces():
        _add_product(d_v, piece, distribution.read(piece, part), distribution.rows(d_output, piece))
    return d_v


def block_gradient(
    q: Tensor, k: Tensor, values: list[Tensor], d_outputs: list[Tensor], delta: Tensor, saved: Tensor, scores: Scores
) -> list[Tensor]:
    """dQ, dK, dV of the first values, and those of ``scores.learned``: one pass for all layers that share P.

    dS = P * (sum of dO_i V_i^T - delta); the sum is one product, because the heads of all values lie side by side.
    """
    distribution = _Distribution(q, k, scores, saved)
    d_q, d_k, d_v = empty_heads(q), empty_heads(k), empty_heads(values[0])
    for piece, part in distribution.pieces():
        probabilities = distribution.read(piece, part)
        of_rows = [distribution.rows(d_output, piece) for d_output in d_outputs]
        _add_product(d_v, piece, probabilities, of_rows[0])
        d_scores = distribution.room(piece)
        torch.bmm(_side_by_side(of_rows), _side_by_side([_columns(v, piece) for v in values]).mT, out=d_scores)
        d_scores.sub_(distribution.rows(delta, piece).unsqueeze(-1)).mul_(probabilities)
        if distribution.has_queries:
            distribution.put_rows(d_q, piece, torch.bmm(d_scores, _columns(k, piece)).mul_(distribution.scale))
            _add_product(d_k, piece, d_scores, distribution.queries(piece))
        for each in distribution.additions:
            each.add_gradient(piece, d_scores)
    return [d_q, d_k, d_v, *distribution.gradients()]


def kernels(name: str, store: bool) -> BlockKernels:
    """The four functions as operators, with or without storing P."""
    forward = functools.partial(attend_forward, store=store)
    return as_operators(
        name,
        BlockKernels(forward, reuse_forward, value_gradient, block_gradient),
        saved_like=lambda q, k, scores: q.new_empty(stored_size(q, k) if store else 0),
        keeps_distribution=store,
    )


def _columns(x: Tensor, piece: Piece) -> Tensor:
    """A piece's keys of x (B, N, K, D): (sequences x heads, keys, D); a view where there is one sequence."""
    return x[piece.sequences, piece.heads, : piece.keys].flatten(0, 1)


def _add_product(total: Tensor, piece: Piece, probabilities: Tensor, rows: Tensor) -> None:
    """total += P^T rows, at the piece's heads; the first rows of a head start the sum."""
    product = torch.bmm(probabilities.transpose(1, 2), rows)
    heads = total[piece.sequences, piece.heads]
    seen = heads[..., : piece.keys, :]
    if piece.rows.start:
        seen.add_(product.view_as(seen))
    else:
        seen.copy_(product.view_as(seen))
        heads[..., piece.keys :, :] = 0


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
    if size.number < SINGLE:  # dS in single precision, where sums are made of it or taken from it
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
