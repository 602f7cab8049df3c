"""What tiles and picked keys of a segment's rows take in: products with keys, a learned bias by distance, positions.

Rows are (X, L, ...), X sequences times heads and L queries of a segment; keys are (B, N, K, D) as the model has them.
torch multiplies a batch of matrices without a copy where one number is the step from each to the next, so we loop over
what is left: on a processor each product is long enough to pay for its call.
"""

from collections.abc import Iterator
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention.pieces import BiasByDistance, scratch, sum_along_diagonals, sum_dtype
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.attention.tile_geometry import Part, Picked, Segment, Tiles


class Piece(NamedTuple):
    """What is computed at once: a segment of queries, for some sequences and heads."""

    sequences: slice
    heads: slice
    segment: Segment

    @property
    def groups(self) -> int:
        """X."""
        return (self.sequences.stop - self.sequences.start) * (self.heads.stop - self.heads.start)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of its rows, (X, L, width)."""
        return self.groups, self.segment.length, self.segment.width

    def of(self, x: Tensor) -> Tensor:
        """Its sequences and heads of (B, N, ...)."""
        return x[self.sequences, self.heads]

    def rows_of(self, x: Tensor, name: str) -> Tensor:
        """Its queries of x (B, N, T, D): (X, L, D) with zeros in front and behind, in scratch memory of that name."""
        segment, found = self.segment, self.of(x)
        rows = scratch(name, (*found.shape[:2], segment.length, x.size(-1)), x)
        rows[:, :, : segment.inside.start] = 0
        rows[:, :, segment.inside.stop :] = 0
        rows[:, :, segment.inside] = found[:, :, segment.queries]
        return rows.flatten(0, 1)

    def put_rows(self, out: Tensor, rows: Tensor) -> None:
        """Writes (X, L, D) where :meth:`rows_of` reads."""
        here = self.of(out)[:, :, self.segment.queries]
        here.copy_(rows[:, self.segment.inside].unflatten(0, here.shape[:2]))


class TiledKeys:
    """Keys of tiles: a copy in a row, (X, places, D), that tiles see through windows."""

    def __init__(self, part: Tiles, groups: int, like: Tensor, name: str = "keys"):
        self.part = part
        self.copy = scratch(name, (groups, part.keys.stop - part.keys.start, like.size(-1)), like)

    def _inside(self, keys: int) -> tuple[slice, slice]:
        """(places of the model's `keys`, where they are in the copy)."""
        low, high = max(0, self.part.keys.start), min(keys, self.part.keys.stop)
        return slice(low, high), slice(low - self.part.keys.start, high - self.part.keys.start)

    def read(self, tokens: Tensor) -> "TiledKeys":
        """Fills the copy from (sequences, heads, tokens, D), with zeros in front and behind."""
        there, here = self._inside(tokens.size(2))
        self.copy[:, : here.start] = 0
        self.copy[:, here.stop :] = 0
        self.copy[:, here].unflatten(0, tokens.shape[:2]).copy_(tokens[:, :, there])
        return self

    def add_to(self, tokens: Tensor) -> None:
        """Adds the copy to what :meth:`read` would read."""
        there, here = self._inside(tokens.size(2))
        tokens[:, :, there] += self.copy[:, here].unflatten(0, tokens.shape[:2])

    @property
    def windows(self) -> Tensor:
        """(X, S, G, C, D), overlapping."""
        return self.between(0, self.part.columns)

    def between(self, low: int, high: int) -> Tensor:
        """The same columns of all windows."""
        part, (groups, length, size) = self.part, self.copy.shape
        return self.copy.as_strided(
            (groups, part.step, part.count, high - low, size),
            (length * size, size, part.rows * part.step * size, part.step * size, 1),
            self.copy.storage_offset() + low * part.step * size,
        )


def tiled(rows: Tensor, part: Tiles) -> Tensor:
    """A view of (X, L, ...): (X, S, G, R, ...)."""
    return rows.unflatten(1, (part.count, part.rows, part.step)).permute(0, 3, 1, 2, 4)


class Products(NamedTuple):
    """What products of a piece know of keys.

    Attributes:
        extra: how many of the K are no tokens.
        given: (B, P): places of keys given by sequence; None where there are none.
    """

    extra: int
    given: Optional[Tensor]

    def score(self, part: Part, piece: Piece, out: Tensor, rows: Tensor, keys: Tensor) -> None:
        """Writes the part's entries of `out` (X, L, width): products of rows (X, L, D) and keys (B, N, K, D)."""
        if isinstance(part, Picked):
            torch.bmm(rows, self._pick(part, piece, keys).mT, out=out[..., part.slot])
            return
        windows = TiledKeys(part, piece.groups, keys).read(self._tokens(piece, keys)).windows
        for entries, queries, columns in _batches(tiled(out[..., part.slot], part), tiled(rows, part), windows):
            torch.bmm(queries, columns.mT, out=entries)

    def combine(self, part: Part, piece: Piece, entries: Tensor, keys: Tensor, out: Tensor, is_first: bool) -> None:
        """Adds products of the part's entries and keys to `out` (X, L, D); the first part's start the sum."""
        if isinstance(part, Picked):
            _multiply(entries[..., part.slot], self._pick(part, piece, keys), out, is_first)
            return
        windows = TiledKeys(part, piece.groups, keys).read(self._tokens(piece, keys)).windows
        for result, weights, columns in _batches(tiled(out, part), tiled(entries[..., part.slot], part), windows):
            _multiply(weights, columns, result, is_first)

    def scatter(self, part: Part, piece: Piece, entries: Tensor, rows: Tensor, total: Tensor) -> None:
        """Adds to `total` (B, N, K, D), a sum over queries: products of the part's entries, turned, and rows."""
        if isinstance(part, Picked):
            product = torch.bmm(entries[..., part.slot].mT, rows).to(total.dtype)
            self._add_picked(part, piece, product, total)
            return
        keys = TiledKeys(part, piece.groups, rows)
        keys.copy.zero_()
        tiles = (tiled(entries[..., part.slot], part), tiled(rows, part))
        # Windows overlap, but not those of as many columns as a tile has rows.
        for low in range(0, part.columns, part.rows):
            high = min(part.columns, low + part.rows)
            for sums, weights, queries in _batches(keys.between(low, high), *tiles):
                _multiply(weights[..., low:high].mT, queries, sums, is_first=False)
        keys.add_to(self._tokens(piece, total))

    def _tokens(self, piece: Piece, keys: Tensor) -> Tensor:
        return piece.of(keys)[:, :, : keys.size(2) - self.extra]

    def _pick(self, part: Picked, piece: Piece, keys: Tensor) -> Tensor:
        """(X, P, D)."""
        keys = piece.of(keys)
        if part.places is None:
            return keys.gather(2, self._given(piece, keys)).flatten(0, 1)
        return keys.index_select(2, part.places).flatten(0, 1)

    def _add_picked(self, part: Picked, piece: Piece, product: Tensor, total: Tensor) -> None:
        total = piece.of(total)
        product = product.unflatten(0, total.shape[:2])
        if part.places is None:
            total.scatter_add_(2, self._given(piece, total), product)
        else:
            total.index_add_(2, part.places, product)

    def _given(self, piece: Piece, keys: Tensor) -> Tensor:
        places = self.given[piece.sequences, None, :, None]
        return places.expand(-1, keys.size(1), -1, keys.size(-1))


def _multiply(left: Tensor, right: Tensor, out: Tensor, is_first: bool) -> None:
    if is_first:
        torch.bmm(left, right, out=out)
    else:
        torch.baddbmm(out, left, right, out=out)


def _batches(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """From (X, S, G, ...) the batches of matrices over the longer of S and G."""
    groups, step, count = tensors[0].shape[:3]
    for group in range(groups):
        for number in range(min(step, count)):
            yield tuple(x[group, number] if count >= step else x[group, :, number] for x in tensors)


class Bias(BiasByDistance):
    """A learned bias: all tiles of a part have the same one, by row and column.

    Args:
        scores: of it, with a table.
        q, k: (B, N, T, D) and (B, N, K, D).
        given: (B, P): places of keys given by sequence.
    """

    def __init__(self, scores: Scores, q: Tensor, k: Tensor, given: Optional[Tensor]):
        super().__init__(scores, q)
        self.given = given
        self.zero = k.size(-2) - scores.extra - 1  # the entry of distance 0

    def add(self, piece: Piece, out: Tensor) -> None:
        """Adds it to the rows of a piece, (X, L, width)."""
        by_distance = self.by_distance[piece.heads]
        for part in piece.segment.parts:
            if isinstance(part, Tiles):
                along = by_distance[:, self._entries(part.ahead(out.device))[0]]
                by_row = along.unfold(-1, part.columns, 1).flip(1)  # (heads, R, C)
                entries = tiled(out[..., part.slot], part)
                by_head = entries.unflatten(0, (-1, len(by_row)))
                by_head += by_row[:, None, None]
            elif part.are_tokens:
                by_sequence = out[..., part.slot].unflatten(0, (-1, len(by_distance)))
                by_sequence += by_distance[:, self._of_picked(part, piece)[0]].transpose(0, 1)

    def add_gradient(self, piece: Piece, d_scores: Tensor) -> None:
        """Adds the gradient of dS, (X, L, width)."""
        total = self.gradient[piece.heads]
        for part in piece.segment.parts:
            entries = d_scores[..., part.slot]
            if isinstance(part, Tiles):
                by_head = tiled(entries, part).unflatten(0, (-1, len(total)))
                in_tile = by_head.sum((0, 2, 3), dtype=total.dtype).flip(1)  # (heads, R, C), the last row first
                sums = sum_along_diagonals(torch.nn.functional.pad(in_tile, (0, part.rows)))
                places, is_there = self._entries(part.ahead(total.device))
                total.index_add_(1, places, sums.where(is_there, 0))
            elif part.are_tokens:
                by_sequence = entries.unflatten(0, (-1, len(total))).to(total.dtype).transpose(0, 1)
                places, is_there = self._of_picked(part, piece)
                by_sequence = by_sequence.where(is_there, 0)
                total.index_add_(1, places.flatten(), by_sequence.reshape(len(total), -1))

    def _entries(self, ahead: Tensor) -> tuple[Tensor, Tensor]:
        """(entries of distances, whether there is such a distance)."""
        places = ahead + self.zero
        last = self.by_distance.size(-1) - 1
        return places.clamp(0, last), (places >= 0) & (places <= last)

    def _of_picked(self, part: Picked, piece: Piece) -> tuple[Tensor, Tensor]:
        """As :meth:`_entries`, (sequences, L, P)."""
        segment = piece.segment
        queries = segment.first + torch.arange(segment.length, device=self.by_distance.device)
        if part.places is None:
            places = self.given[piece.sequences]
        else:
            places = part.places.expand(piece.sequences.stop - piece.sequences.start, -1)
        return self._entries(places[:, None] - queries[:, None])


class Positions:
    """Transformer-XL's positions: tiles multiply queries with their distances, and shift each row by one more.

    Args:
        scores: of it, with positions.
        q, k: (B, N, T, D) and (B, N, K, D).
        given: (B, P): places of keys given by sequence.
    """

    def __init__(self, scores: Scores, q: Tensor, k: Tensor, given: Optional[Tensor]):
        self.all_queries = scores.position_queries_BNTD
        # From distance -1 up to K - 1: what a key is to neighbouring queries lies side by side.
        self.distances = scores.distances_NKD.flip(1)
        self.given = given
        self.d_queries = torch.zeros_like(self.all_queries)
        self.d_distances = torch.zeros_like(self.distances, dtype=sum_dtype(q))

    def add(self, piece: Piece, out: Tensor) -> None:
        """Adds them to the rows of a piece, (X, L, width)."""
        queries = piece.rows_of(self.all_queries, "position queries")
        for part in piece.segment.parts:
            entries = out[..., part.slot]
            if isinstance(part, Tiles):
                by_distance = _Room(part, piece, queries)
                by_distance.multiply(queries, self.distances[piece.heads, self._places(part)])
                entries = tiled(entries, part)
                entries += by_distance.shifted
            elif part.are_tokens:
                for column in self._columns(part, piece):
                    here = column.of(entries)[..., column.number]
                    here += (column.of(queries) * self.distances[piece.heads, column.distances]).sum(-1)

    def add_gradient(self, piece: Piece, d_scores: Tensor) -> None:
        """Adds the gradients of dS, (X, L, width)."""
        queries = piece.rows_of(self.all_queries, "position queries")
        d_queries = torch.zeros_like(queries)
        total = self.d_distances[piece.heads]
        for part in piece.segment.parts:
            entries = d_scores[..., part.slot]
            if isinstance(part, Tiles):
                by_distance, places = _Room(part, piece, queries), self._places(part)
                by_distance.all.zero_()
                by_distance.shifted.copy_(tiled(entries, part))
                d_queries += by_distance.combine(self.distances[piece.heads, places])
                total.index_add_(1, places, by_distance.scatter(queries).to(total.dtype))
            elif part.are_tokens:
                for column in self._columns(part, piece):
                    d = column.of(entries)[..., column.number, None]
                    d_here = column.of(d_queries)
                    d_here += d * self.distances[piece.heads, column.distances]
                    total[:, column.distances] += (d * column.of(queries)).sum(0, dtype=total.dtype)
        piece.put_rows(self.d_queries, d_queries)

    def gradients(self) -> dict[int, Tensor]:
        """By their number in ``scores.learned``."""
        return {1: self.d_queries, 2: self.d_distances.flip(1).to(self.all_queries.dtype)}

    def _places(self, part: Tiles) -> Tensor:
        """(C + R,): entries of the distances along a tile, and one more. Those that there are not belong to no key."""
        ahead = part.ahead(self.distances.device)
        return (1 - torch.cat([ahead, ahead[-1:]])).clamp(0, self.distances.size(1) - 1)

    def _columns(self, part: Picked, piece: Piece) -> Iterator["_Column"]:
        sequences = piece.sequences.stop - piece.sequences.start
        if part.places is not None:
            by_group = [(slice(0, sequences), part.places.tolist())]
        else:
            given = self.given[piece.sequences].tolist()
            by_group = [(slice(number, number + 1), places) for number, places in enumerate(given)]
        for group, places in by_group:
            for number, place in enumerate(places):
                begin = 1 + piece.segment.first - place  # the entry of the distance from the first query
                low, high = max(0, begin), min(self.distances.size(1), begin + piece.segment.length)
                if low < high:  # else it is in the future of all
                    yield _Column(number, sequences, group, slice(low - begin, high - begin), slice(low, high))


class _Column(NamedTuple):
    """One key against the queries of a piece: neighbouring queries have neighbouring distances.

    Attributes:
        number: of its entry in the part's slot.
        sequences: of the piece.
        group: those that it belongs to.
        rows: queries that do not have it in their future (the first of them may, by one).
        distances: theirs.
    """

    number: int
    sequences: int
    group: slice
    rows: slice
    distances: slice

    def of(self, x: Tensor) -> Tensor:
        """(sequences, heads, rows, ...) of (X, L, ...), a view."""
        return x.unflatten(0, (self.sequences, -1))[self.group, :, self.rows]


class _Room:
    """Scores of tiles by query and distance, (X, S, G, R, C + R), of which those by query and key are a view."""

    def __init__(self, part: Tiles, piece: Piece, like: Tensor):
        self.part = part
        self.width = part.columns + part.rows
        shape = (piece.groups, part.step, part.count, part.rows, self.width)
        self.all = scratch("by_distance", shape, like)
        self.heads = piece.heads.stop - piece.heads.start

    @property
    def shifted(self) -> Tensor:
        """(X, S, G, R, C)."""
        # Entry (r, c) of a tile is entry R - 1 - r + c of row r, and so number R - 1 + r (width - 1) + c of all rows.
        shape = (*self.all.shape[:4], self.part.columns)
        strides = (*self.all.stride()[:3], self.width - 1, 1)
        return self.all.as_strided(shape, strides, self.all.storage_offset() + self.part.rows - 1)

    def multiply(self, queries: Tensor, distances: Tensor) -> None:
        """Products of (X, L, D) and distances (heads, C + R, D)."""
        for at, rows in self._by_sequence(queries):
            torch.bmm(rows, distances.mT, out=at)

    def combine(self, distances: Tensor) -> Tensor:
        """(X, L, D): sums of distances."""
        part = self.part
        products = torch.cat([torch.bmm(at, distances) for at in self.all.flatten(1, 3).split(self.heads)])
        by_tile = products.unflatten(1, (part.step, part.count, part.rows))
        return by_tile.permute(0, 2, 3, 1, 4).flatten(1, 3)

    def scatter(self, queries: Tensor) -> Tensor:
        """(heads, C + R, D): sums of queries."""
        return torch.stack([torch.bmm(at.mT, rows) for at, rows in self._by_sequence(queries)]).sum(0)

    def _by_sequence(self, queries: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        rows = tiled(queries, self.part).flatten(1, 3)
        return zip(self.all.flatten(1, 3).split(self.heads), rows.split(self.heads), strict=True)
