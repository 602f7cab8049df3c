"""Attention that computes no more than its mask shows, in tiles; see :mod:`.tile_geometry`.

A piece is a segment of queries for as many heads and sequences as a cache holds; its rows hold the entries of all parts
of the mask, so that softmax or entmax act on them as if nothing else existed.
"""

from collections.abc import Iterator, Sequence
from typing import Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention import tile_geometry, weights
from lazyformer_fairseq.modules.attention.lazy_block import empty_heads, learned_gradients
from lazyformer_fairseq.modules.attention.pieces import ByPieces, Distribution, scratch, sum_dtype
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.attention.tile_geometry import Picked, Tiles
from lazyformer_fairseq.modules.attention.tile_parts import Bias, Piece, Positions, Products, TiledKeys, tiled
from lazyformer_fairseq.modules.memory_costs import SINGLE, AttentionSize, Memory

# Features of scores that these lack.
LACKS = frozenset({"learned", "synthetic"})
_HIDDEN = float("-inf")


class InTiles(Distribution):
    """P of what a mask shows."""

    def __init__(self, q: Tensor, k: Tensor, scores: Scores, stored: Optional[Tensor] = None):
        super().__init__(q, k, scores, stored)
        given = given_places(scores)
        self.plans = tile_geometry.plans(q, k, scores, 0 if given is None else given.size(1))
        self.products = Products(scores.extra, given)
        self.hidden = Hidden(scores, given, k.size(-2) - scores.extra, q)
        self.added = [
            added(scores, q, k, given)
            for added, part in ((Bias, scores.table_KN), (Positions, scores.position_queries_BNTD))
            if part is not None
        ]
        self.exponents = None if scores.exponent_N is None else scores.exponent_N.to(sum_dtype(q))
        self.d_exponents = None if self.exponents is None else torch.zeros_like(self.exponents)
        layers = range(0 if scores.dropout is None else len(scores.dropout.seeds))
        self.masks = [weights.Masks(scores.dropout, layer, q.device) for layer in layers]

    @classmethod
    def stored_size(cls, q: Tensor, k: Tensor, scores: Scores) -> int:
        """0 with keys given by sequence: how many they are is not known to a compiler."""
        if scores.seen_BK is not None:
            return 0
        return tile_geometry.count(q.shape, k.shape, scores, q.device.type)

    def cut(self) -> Iterator[Piece]:
        sequences = self.q.size(0)
        for of_heads, segments in self.plans:
            for segment in segments:
                heads = of_heads.stop - of_heads.start
                several, at_once = heads, sequences
                if self.q.device.type == "cpu":
                    size = segment.length * segment.width
                    several = min(heads, max(1, tile_geometry.SEGMENT_ELEMENTS // size))
                    at_once = max(1, tile_geometry.SEGMENT_ELEMENTS // (heads * size))
                for sequence in range(0, sequences, at_once):
                    for head in range(of_heads.start, of_heads.stop, several):
                        yield Piece(
                            slice(sequence, min(sequences, sequence + at_once)),
                            slice(head, min(of_heads.stop, head + several)),
                            segment,
                        )

    def rows(self, x: Tensor, piece: Piece) -> Tensor:
        return piece.rows_of(x, "rows")

    def put_rows(self, out: Tensor, piece: Piece, rows: Tensor) -> None:
        piece.put_rows(out, rows)

    def queries(self, piece: Piece) -> Tensor:
        """Q / sqrt(D), (X, L, D)."""
        return piece.rows_of(self.q, "queries").mul_(self.scale)

    def compute(self, piece: Piece, out: Optional[Tensor] = None) -> Tensor:
        queries = self.queries(piece)
        out = scratch("probabilities", piece.shape, queries) if out is None else out
        self._score(piece, out, queries, self.k)
        for added in self.added:
            added.add(piece, out)
        self.hidden.hide(piece, out)
        # A row that sees nothing shall be zero, not NaN: its own place counts while it becomes a distribution. Beside
        # any other score it counts nothing; half the least number, so that sums stay finite.
        own = piece.segment.own
        own_places = tiled(out[..., own.slot], own)[..., own.before :].diagonal(dim1=-2, dim2=-1)
        are_hidden = own_places == _HIDDEN
        own_places.clamp_(min=torch.finfo(out.dtype).min / 2)
        if self.exponents is None:
            torch.softmax(out, -1, out=out)
        else:
            by_head = out.unflatten(0, (-1, piece.heads.stop - piece.heads.start))
            by_head.copy_(weights.distribution(by_head, self.exponents[piece.heads], out.dtype))
        own_places.masked_fill_(are_hidden, 0)
        return out

    def _score(self, piece: Piece, out: Tensor, rows: Tensor, keys: Tensor) -> None:
        for part in piece.segment.parts:
            self.products.score(part, piece, out, rows, keys)

    def combine(self, piece: Piece, probabilities: Tensor, v: Tensor) -> Tensor:
        rows = scratch("sums", (*piece.shape[:2], v.size(-1)), v)
        for part in piece.segment.parts:
            self.products.combine(part, piece, probabilities, v, rows, is_first=part is piece.segment.parts[0])
        return rows

    def thinned(self, piece: Piece, probabilities: Tensor, masks: Optional[Sequence[Tensor]] = None) -> Tensor:
        """After dropout of the first layer, whose mask is the first of `masks`, or drawn."""
        masks = self.draw(piece) if masks is None else masks
        if not masks:
            return probabilities
        thin = scratch("thinned", probabilities.shape, probabilities)
        return torch.mul(probabilities, self.scores.dropout.scale, out=thin).masked_fill_(masks[0], 0)

    def draw(self, piece: Piece) -> list[Tensor]:
        """Dropout's masks of a piece, (X, L, width), one for each layer; none without dropout."""
        return [masks.draw(piece.shape) for masks in self.masks]

    def sums(self, like: Tensor) -> Tensor:
        """Zeros, to sum in single precision or better."""
        return like.to(sum_dtype(like)).zero_()

    def add_product(self, total: Tensor, piece: Piece, probabilities: Tensor, rows: Tensor) -> None:
        for part in piece.segment.parts:
            self.products.scatter(part, piece, probabilities, rows, total)

    def block_gradient(self, values: list[Tensor], d_outputs: list[Tensor], delta: Tensor) -> list[Tensor]:
        """dP = sum of dO_i V_i^T is one product, because the heads of all values lie side by side.

        With dropout it is one of each layer, through its mask.
        """
        d_q, d_k, d_v = empty_heads(self.q), self.sums(empty_heads(self.k)), self.sums(empty_heads(values[0]))
        if not self.masks and len(values) > 1:
            values, d_outputs = [torch.cat(values, -1)], [torch.cat(d_outputs, -1)]
        for piece, part in self.pieces():
            probabilities, masks = self.read(piece, part), self.draw(piece)
            rows = self.rows(d_outputs[0], piece)
            self.add_product(d_v, piece, self.thinned(piece, probabilities, masks), rows[..., : d_v.size(-1)])
            d_entries = self._d_entries(piece, masks, rows, values, d_outputs)
            d_scores = self._differentiate(piece, probabilities, d_entries, delta)
            for added in self.added:
                added.add_gradient(piece, d_scores)
            self.put_rows(d_q, piece, self.combine(piece, d_scores, self.k).mul_(self.scale))
            self.add_product(d_k, piece, d_scores, self.queries(piece))
        found = {number: gradient for added in self.added for number, gradient in added.gradients().items()}
        if self.d_exponents is not None:
            found[3] = self.d_exponents.to(self.scores.exponent_N.dtype)
        return [d_q, d_k.to(self.k.dtype), d_v.to(self.k.dtype), *learned_gradients(found, self.q)]

    def _d_entries(
        self, piece: Piece, masks: list[Tensor], rows: Tensor, values: list[Tensor], d_outputs: list[Tensor]
    ) -> Tensor:
        """dP, of which `rows` are those of the first of `d_outputs`."""
        total = scratch("scores", piece.shape, rows)
        self._score(piece, total, rows, values[0])
        if not masks:
            return total
        total.masked_fill_(masks[0], 0)  # a product with it would copy it as numbers
        for mask, of_layer, d_output in zip(masks[1:], values[1:], d_outputs[1:], strict=True):
            one = scratch("scores of a consumer", piece.shape, rows)
            self._score(piece, one, piece.rows_of(d_output, "rows of a consumer"), of_layer)
            total += one.masked_fill_(mask, 0)
        return total.mul_(self.scores.dropout.scale)

    def _differentiate(self, piece: Piece, probabilities: Tensor, d_entries: Tensor, delta: Tensor) -> Tensor:
        """From dP, in its memory, dS."""
        if self.exponents is None:
            return d_entries.sub_(piece.rows_of(delta.unsqueeze(-1), "delta")).mul_(probabilities)
        heads, exact = (-1, piece.heads.stop - piece.heads.start), sum_dtype(d_entries)
        by_head = (x.unflatten(0, heads).to(exact) for x in (probabilities, d_entries))
        d_scores, d_exponents = weights.gradient(*by_head, self.exponents[piece.heads])
        self.d_exponents[piece.heads] += d_exponents
        return d_entries.copy_(d_scores.flatten(0, 1))


STORING, COMPUTING = ByPieces(InTiles, store=True), ByPieces(InTiles, store=False)


def given_places(scores: Scores) -> Optional[Tensor]:
    """(B, P): the places of ``scores.seen_BK``; behind those of a sequence with fewer than P some others, to hide."""
    if scores.seen_BK is None:
        return None
    most = int(scores.seen_BK.sum(-1).max())
    return scores.seen_BK.int().argsort(stable=True, dim=-1, descending=True)[:, :most]


class Hidden:
    """What is left out of rows: by a plan's masks, by padding; of all other parts also the keys given by sequence.

    Args:
        scores: of it.
        given: see :func:`given_places`.
        tokens: K without extra keys.
        like: a tensor of the scores' device and precision.
    """

    def __init__(self, scores: Scores, given: Optional[Tensor], tokens: int, like: Tensor):
        self.scores = scores
        self.given = given
        self.tokens = tokens
        padding, seen = scores.is_padding(tokens), scores.seen_BK
        masks = [mask for mask in (padding, seen) if mask is not None]
        is_hidden = masks[0] if len(masks) == 1 else masks[0] | masks[1] if masks else None
        if is_hidden is not None and like.device.type == "cpu" and not bool(is_hidden.any()):
            is_hidden = None
        self.by_key = None if is_hidden is None else _added(is_hidden, like)
        if given is not None:
            hidden = ~seen if padding is None else ~seen | padding
            self.by_given = _added(hidden.gather(1, given), like)

    def hide(self, piece: Piece, out: Tensor) -> None:
        """-inf at entries of `out` (X, L, width) that are left out."""
        for part in piece.segment.parts:
            if isinstance(part, Picked):
                self._hide_picked(part, piece, out[..., part.slot])
            else:
                self._hide_tiles(part, piece, tiled(out[..., part.slot], part))

    def _hide_picked(self, part: Picked, piece: Piece, entries: Tensor) -> None:
        if not part.are_tokens:
            return
        if part.hidden is not None:
            entries += part.hidden
        by_sequence = entries.unflatten(0, (piece.sequences.stop - piece.sequences.start, -1))
        if part.places is None:
            by_sequence += self.by_given[piece.sequences, None, None]
            if self.scores.is_causal:
                queries = piece.segment.first + torch.arange(piece.segment.length, device=entries.device)
                is_future = self.given[piece.sequences, None, :] > queries[:, None]
                by_sequence.masked_fill_(is_future[:, None], _HIDDEN)
        elif self.by_key is not None:
            by_sequence += self.by_key[piece.sequences][:, part.places][:, None, None]

    def _hide_tiles(self, part: Tiles, piece: Piece, entries: Tensor) -> None:
        """Of entries (X, S, G, R, C)."""
        mask = part.mask
        if mask.full is not None:
            entries += mask.full
        for run in mask.runs:
            entries[..., run] += mask.pattern[:, run]
        for number, hidden in mask.exceptions:
            entries[:, number // part.count, number % part.count] += hidden
        if self.by_key is not None:
            self._hide_keys(part, piece, entries)

    def _hide_keys(self, part: Tiles, piece: Piece, entries: Tensor) -> None:
        found = self.by_key[piece.sequences, None, :, None]
        windows = TiledKeys(part, len(found), found, "hidden keys").read(found).windows  # (B, S, G, C, 1)
        by_sequence = entries.unflatten(0, (len(found), -1))
        by_sequence += windows[:, None, :, :, None, :, 0]


def _added(is_hidden: Tensor, like: Tensor) -> Tensor:
    return like.new_zeros(is_hidden.shape).masked_fill_(is_hidden, _HIDDEN)


def count_memory(size: AttentionSize) -> Memory:
    """Of an ``s``, besides queries, keys, values and output."""
    kept = size.shown * size.number if size.consumers else 0
    piece, share = _count_piece(size)
    has_positions, rows = "positions" in size.features, int(size.queries * share)
    # Scores by distance have as many columns more as a tile has rows.
    in_tile, columns = tile_geometry.TILE if size.in_tiles else size.time, size.shown // size.rows
    by_distance = piece + int(size.rows * share) * in_tile
    scratch = (piece * (not size.consumers) + by_distance * has_positions) * size.number + (3 + has_positions) * rows
    more_scratch = piece * size.number + rows * (1 + size.consumers)
    sums = 2 * (size.values // size.number) * size.single  # of gradients of keys and values
    backward = size.queries + sums + 2 * size.values * (size.number < SINGLE) + size.rows * SINGLE + 2 * rows
    is_half, of_tiles = size.number < SINGLE, 0
    if "bias" in size.features:  # a tile of each head, which is summed along diagonals
        of_tiles = size.heads * in_tile * (2 * columns + in_tile) * SINGLE + is_half * piece * SINGLE
    if "entmax" in size.features:
        of_tiles = 9 * piece * SINGLE
    backward += max(of_tiles, 2 * is_half * piece * SINGLE)  # dS in single precision, where sums are taken from it
    pending = size.consumers * (size.queries + size.values)
    forward = rows
    if size.dropout:
        scratch += piece * size.number
        more_scratch += (piece * size.number + rows) * bool(size.consumers)
        forward, backward = forward + _count_masks(size, 1), backward + _count_masks(size, 1 + size.consumers)
    if size.device == "cpu":
        return Memory(kept, forward, backward, pending, scratch, more_scratch)
    return Memory(kept, forward + scratch, backward + scratch + more_scratch, pending)


def count_reuse_memory(size: AttentionSize) -> Memory:
    """Of an ``l``, besides values and output."""
    _, share = _count_piece(size)
    rows, masks = int(size.queries * share), _count_masks(size, 1) if size.dropout else 0
    return Memory(0, rows + masks, size.queries + (size.values // size.number) * size.single + rows + masks)


def _count_masks(size: AttentionSize, layers: int) -> int:
    """Dropout's of a piece, and on a GPU the 16 bits that one is drawn from; a processor's are no tensor of torch's."""
    piece, _ = _count_piece(size)
    return piece * (layers + (0 if size.device == "cpu" else 2))


def _count_piece(size: AttentionSize) -> tuple[int, float]:
    """Entries of a piece, and which share of all that is."""
    piece = min(size.shown, tile_geometry.SEGMENT_ELEMENTS) if size.device == "cpu" else size.shown
    return piece, piece / size.shown
