"""Attention in tiles: the four functions of :class:`~lazyformer_fairseq.modules.attention.block_kernels.BlockKernels`.

A piece is a stretch of queries (:mod:`.geometry`) for as many heads and sequences as a cache holds; its rows hold the
entries of all parts of the mask, so that softmax or entmax act on them as if nothing else existed. With ``store`` they
are kept.
"""

import functools
import math
from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention import weights
from lazyformer_fairseq.modules.attention.block_kernels import (
    BlockKernels,
    as_operators,
    empty_gradients,
    empty_heads,
    empty_rows,
    with_stored,
)
from lazyformer_fairseq.modules.attention.blocks import kept_memory
from lazyformer_fairseq.modules.attention.dropout import Masks
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.attention.tiles import geometry
from lazyformer_fairseq.modules.attention.tiles.bias import Bias
from lazyformer_fairseq.modules.attention.tiles.hidden import Hidden, OwnPlaces, given_places
from lazyformer_fairseq.modules.attention.tiles.positions import Positions
from lazyformer_fairseq.modules.attention.tiles.products import Piece, Products, put_rows, rows_of

# Features of scores that these lack.
LACKS = frozenset({"learned", "synthetic"})


class _Distribution:
    """P by pieces: read if it is stored, else computed."""

    def __init__(self, q: Tensor, k: Tensor, scores: Scores, stored: Optional[Tensor] = None):
        self.q, self.k, self.scores = q, k, scores
        self.scale = 1 / math.sqrt(max(1, q.size(-1)))
        self.stored = stored if stored is None or stored.numel() else None
        given = given_places(scores)
        self.plans = geometry.plans(q, k, scores, 0 if given is None else given.size(1))
        self.products = Products(scores.extra, given)
        self.hidden = Hidden(scores, given, k.size(-2) - scores.extra, q)
        self.added = [
            added(scores, q, k, given)
            for added, part in ((Bias, scores.table_KN), (Positions, scores.position_queries_BNTD))
            if part is not None
        ]
        exact = torch.promote_types(q.dtype, torch.float32)
        self.exponents = None if scores.exponent_N is None else scores.exponent_N.to(exact)
        self.d_exponents = None if self.exponents is None else torch.zeros_like(self.exponents)
        layers = range(0 if scores.dropout is None else len(scores.dropout.seeds))
        self.masks = [Masks(scores.dropout, layer, q.device) for layer in layers]

    def pieces(self) -> Iterator[tuple[Piece, Optional[Tensor]]]:
        """All pieces, each with its part of the stored distribution."""
        return with_stored(self._pieces(), self.stored)

    def _pieces(self) -> Iterator[Piece]:
        sequences = self.q.size(0)
        for plan in self.plans:
            for stretch in plan.stretches:
                heads = plan.heads.stop - plan.heads.start
                several, at_once = heads, sequences
                if self.q.device.type == "cpu":
                    size = stretch.length * stretch.width
                    several = min(heads, max(1, geometry.STRETCH_ELEMENTS // size))
                    at_once = max(1, geometry.STRETCH_ELEMENTS // (heads * size))
                for sequence in range(0, sequences, at_once):
                    for head in range(plan.heads.start, plan.heads.stop, several):
                        yield Piece(
                            slice(sequence, min(sequences, sequence + at_once)),
                            slice(head, min(plan.heads.stop, head + several)),
                            stretch,
                        )

    def queries(self, piece: Piece) -> Tensor:
        """Q / sqrt(D), (X, L, D)."""
        return rows_of(self.q, piece, "queries").mul_(self.scale)

    def read(self, piece: Piece, stored: Optional[Tensor]) -> Tensor:
        """P of a piece, (X, L, width), read if stored, else computed."""
        return self.compute(piece) if stored is None else stored

    def compute(self, piece: Piece, out: Optional[Tensor] = None) -> Tensor:
        """P of a piece, into `out` if given."""
        queries = self.queries(piece)
        out = kept_memory.scratch("probabilities", piece.shape, queries) if out is None else out
        self._score(piece, out, queries, self.k)
        for added in self.added:
            added.add(piece, out)
        self.hidden.hide(piece, out)
        own_places = OwnPlaces(piece, out)
        if self.exponents is None:
            torch.softmax(out, -1, out=out)
        else:
            by_head = out.unflatten(0, (-1, piece.heads.stop - piece.heads.start))
            by_head.copy_(weights.distribution(by_head, self.exponents[piece.heads], out.dtype))
        own_places.hide()
        return out

    def _score(self, piece: Piece, out: Tensor, rows: Tensor, keys: Tensor) -> None:
        for part in piece.stretch.parts:
            self.products.score(part, piece, out, rows, keys)

    def multiply(self, piece: Piece, entries: Tensor, keys: Tensor) -> Tensor:
        """Sums of keys (B, N, K, D), weighted by entries: (X, L, D)."""
        rows = kept_memory.scratch("sums", (*piece.shape[:2], keys.size(-1)), keys)
        for part in piece.stretch.parts:
            self.products.combine(part, piece, entries, keys, rows, is_first=part is piece.stretch.parts[0])
        return rows

    def draw(self, piece: Piece) -> list[Tensor]:
        """Dropout's masks of a piece, (X, L, width), one for each layer; none without dropout."""
        return [masks.draw(piece.shape) for masks in self.masks]

    def thinned(self, probabilities: Tensor, masks: list[Tensor]) -> Tensor:
        """P of a piece after dropout of the first layer."""
        if not masks:
            return probabilities
        thin = kept_memory.scratch("thinned", probabilities.shape, probabilities)
        return torch.mul(probabilities, self.scores.dropout.scale, out=thin).masked_fill_(masks[0], 0)

    def scatter(self, piece: Piece, entries: Tensor, rows: Tensor, total: Tensor) -> None:
        """Adds to `total` (B, N, K, D) sums of rows, weighted by entries."""
        for part in piece.stretch.parts:
            self.products.scatter(part, piece, entries, rows, total)

    def d_entries(
        self, piece: Piece, masks: list[Tensor], rows: Tensor, values: list[Tensor], d_outputs: list[Tensor]
    ) -> Tensor:
        """dP, of which `rows` are those of the first of `d_outputs`."""
        total = kept_memory.scratch("scores", piece.shape, rows)
        self._score(piece, total, rows, values[0])
        if not masks:
            return total
        total.masked_fill_(masks[0], 0)  # a product with it would copy it as numbers
        for mask, of_layer, d_output in zip(masks[1:], values[1:], d_outputs[1:], strict=True):
            one = kept_memory.scratch("scores of a consumer", piece.shape, rows)
            self._score(piece, one, rows_of(d_output, piece, "rows of a consumer"), of_layer)
            total += one.masked_fill_(mask, 0)
        return total.mul_(self.scores.dropout.scale)

    def differentiate(self, piece: Piece, probabilities: Tensor, d_entries: Tensor, delta: Tensor) -> Tensor:
        """From dP, in its memory, dS."""
        if self.exponents is None:
            return d_entries.sub_(rows_of(delta.unsqueeze(-1), piece, "delta")).mul_(probabilities)
        heads = (-1, piece.heads.stop - piece.heads.start)
        exact = torch.promote_types(d_entries.dtype, torch.float32)
        d_scores, d_exponents = weights.gradient(
            probabilities.unflatten(0, heads).to(exact), d_entries.unflatten(0, heads).to(exact),
            self.exponents[piece.heads],
        )  # fmt: skip
        self.d_exponents[piece.heads] += d_exponents
        return d_entries.copy_(d_scores.flatten(0, 1))

    def gradients(self) -> list[Tensor]:
        """Of ``scores.learned``."""
        found = empty_gradients(self.scores, self.q)
        for added in self.added:
            for place, gradient in added.gradients().items():
                found[place] = gradient
        if self.d_exponents is not None:
            found[3] = self.d_exponents.to(self.scores.exponent_N.dtype)
        return found


def attend_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, store: bool) -> tuple[Tensor, Tensor]:
    """Output (B, N, T, D), and P piece by piece with `store`, else nothing (0,)."""
    stored = kept_memory.empty((_stored_size(q, k, scores, store),), q)
    distribution = _Distribution(q, k, scores, stored)
    output = empty_rows(q, v)
    for piece, part in distribution.pieces():
        probabilities = distribution.compute(piece, part)
        thinned = distribution.thinned(probabilities, distribution.draw(piece))
        put_rows(output, piece, distribution.multiply(piece, thinned, v))
    return output, stored


def reuse_forward(q: Tensor, k: Tensor, v: Tensor, saved: Tensor, scores: Scores) -> Tensor:
    """P V (B, N, T, D)."""
    distribution = _Distribution(q, k, scores, saved)
    output = empty_rows(q, v)
    for piece, part in distribution.pieces():
        thinned = distribution.thinned(distribution.read(piece, part), distribution.draw(piece))
        put_rows(output, piece, distribution.multiply(piece, thinned, v))
    return output


def value_gradient(q: Tensor, k: Tensor, d_output: Tensor, saved: Tensor, scores: Scores) -> Tensor:
    """P^T dO (B, N, K, D)."""
    distribution = _Distribution(q, k, scores, saved)
    d_v = _zeros(empty_rows(k, d_output))
    for piece, part in distribution.pieces():
        thinned = distribution.thinned(distribution.read(piece, part), distribution.draw(piece))
        distribution.scatter(piece, thinned, rows_of(d_output, piece, "rows"), d_v)
    return d_v.to(d_output.dtype)


def block_gradient(
    q: Tensor, k: Tensor, values: list[Tensor], d_outputs: list[Tensor], delta: Tensor, saved: Tensor, scores: Scores
) -> list[Tensor]:
    """dQ, dK, dV of the first values, and those of ``scores.learned``: one pass for all layers that share P.

    dP = sum of dO_i V_i^T is one product, because the heads of all values lie side by side; with dropout it is one of
    each layer, through its mask.
    """
    distribution = _Distribution(q, k, scores, saved)
    d_q, d_k, d_v = empty_heads(q), _zeros(k), _zeros(values[0])
    if not distribution.masks and len(values) > 1:
        values, d_outputs = [torch.cat(values, -1)], [torch.cat(d_outputs, -1)]
    for piece, part in distribution.pieces():
        probabilities, masks = distribution.read(piece, part), distribution.draw(piece)
        rows = rows_of(d_outputs[0], piece, "rows")
        distribution.scatter(piece, distribution.thinned(probabilities, masks), rows[..., : d_v.size(-1)], d_v)
        d_entries = distribution.d_entries(piece, masks, rows, values, d_outputs)
        d_scores = distribution.differentiate(piece, probabilities, d_entries, delta)
        for added in distribution.added:
            added.add_gradient(piece, d_scores)
        put_rows(d_q, piece, distribution.multiply(piece, d_scores, k).mul_(distribution.scale))
        distribution.scatter(piece, d_scores, distribution.queries(piece), d_k)
    return [d_q, d_k.to(k.dtype), d_v.to(k.dtype), *distribution.gradients()]


def kernels(name: str, store: bool) -> BlockKernels:
    """The four functions as operators, with or without storing P."""
    return as_operators(
        name,
        BlockKernels(functools.partial(attend_forward, store=store), reuse_forward, value_gradient, block_gradient),
        saved_like=lambda q, k, scores: q.new_empty(_stored_size(q, k, scores, store)),
        keeps_distribution=store,
        count_scores=geometry.count,
    )


def _stored_size(q: Tensor, k: Tensor, scores: Scores, store: bool) -> int:
    """How many numbers it takes; 0 with keys given by sequence: how many they are is not known to a compiler."""
    if not store or scores.seen_BK is not None:
        return 0
    return geometry.count(q.shape, k.shape, scores.flat(), q.device.type).by_key


def _zeros(like: Tensor) -> Tensor:
    """To sum in single precision or better, of the layout of a gradient."""
    return empty_heads(like).to(torch.promote_types(like.dtype, torch.float32)).zero_()
