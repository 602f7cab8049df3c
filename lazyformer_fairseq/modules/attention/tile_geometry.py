"""What a mask computes: tiles and picked keys, for segments of queries.

A part of a mask becomes *tiles* of neighbouring queries, each against one run of keys: of all positions, or, where the
part has a dilation, of every position with the same remainder. Keys that all queries see (:class:`Columns`, keys given
by sequence, keys that are no tokens) are *picked*: the queries against those keys alone. The scores of a query are the
entries of all parts side by side, its *row*. A mask takes out of a part what it does not show, and what a part before
it in the row has shown: a key counts once.

Places are those of :mod:`lazyformer_fairseq.modules.attention.masks`. A query's own place always has an entry, in a
part of tiles: with padding, or a mask of :class:`Columns`, it may be all that a query is left with.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention.masks import Band, Columns
from lazyformer_fairseq.modules.attention.scores import Scores

# Queries of a tile, where the mask does not give it. Fewer compute less that no query sees; products of 32 are slower.
TILE = 64
# A row has at most so many numbers times queries of a segment on a processor, if a segment of one tile lets it.
SEGMENT_ELEMENTS = 2**21
PLANS = 64  # remembered: one for each length of text and kind of mask
_NOTHING = Band(-1, 0)
_MOST_EXCEPTIONS = 8  # tiles that have a mask of their own, before all have


class Mask(NamedTuple):
    """What a part of a row leaves out, as numbers to add: 0, or -inf.

    Attributes:
        pattern: (R, C), for all tiles; None where nothing is left out.
        runs: columns where it leaves anything out.
        exceptions: (number of the tile, (R, C)), on top.
        full: (S, G, R, C) in place of all that, where tiles differ.
    """

    pattern: Optional[Tensor] = None
    runs: tuple[slice, ...] = ()
    exceptions: tuple[tuple[int, Tensor], ...] = ()
    full: Optional[Tensor] = None


@dataclass(frozen=True, eq=False)
class Tiles:
    """A part of the rows of a segment, in tiles.

    Attributes:
        step: S, the dilation: query number (g R + r) S + s of the segment is row r of tile g of remainder s.
        count: G.
        rows: R.
        columns: C.
        first: column 0 of tile 0 of remainder s is the key at `first` + s; a multiple of S, maybe before all keys.
        before: columns of a tile in front of the key at the place of its first query.
        slot: its entries in a row.
        mask: what is left out.
    """

    step: int
    count: int
    rows: int
    columns: int
    first: int
    before: int
    slot: slice
    mask: Mask = Mask()

    @property
    def keys(self) -> slice:
        """The places that its tiles cover; some may be before all keys, or behind."""
        return slice(self.first, self.first + ((self.count - 1) * self.rows + self.columns) * self.step)

    def ahead(self, device: torch.device) -> Tensor:
        """(C + R - 1,): how far key is ahead of query along a tile: in row r and column c it is entry R - 1 - r + c."""
        steps = torch.arange(self.columns + self.rows - 1, device=device) - (self.rows - 1 + self.before)
        return steps * self.step


@dataclass(frozen=True, eq=False)
class Picked:
    """A part of the rows of a segment: keys that all queries meet.

    Attributes:
        places: of the keys, (P,); None for keys given by sequence.
        are_tokens: whether bias, positions and padding concern them.
        slot: its entries in a row.
        hidden: (queries, P): -inf at the future; None where there is none.
    """

    places: Union[Tensor, Sequence[int], None]
    are_tokens: bool
    slot: slice
    hidden: Optional[Tensor] = None


Part = Union[Tiles, Picked]


@dataclass(frozen=True, eq=False)
class Segment:
    """Neighbouring queries that are computed together.

    Attributes:
        first: the place of the first; it may be before all queries, and the last one behind all: they fill tiles.
        length: how many.
        queries: which of the T queries.
        inside: where these are in the segment.
        parts: of a row.
        width: of a row.
    """

    first: int
    length: int
    queries: slice
    inside: slice
    parts: tuple[Part, ...]
    width: int

    @property
    def own(self) -> Tiles:
        """The part that has each query's own place, on the diagonal that begins in column `before`."""
        return next(part for part in self.parts if isinstance(part, Tiles))


class Key(NamedTuple):
    """What a plan depends on.

    Attributes:
        parts: of the mask.
        time: T.
        tokens: K without extra keys.
        extra: keys that are no tokens.
        given: keys given by sequence, at most.
        is_causal: whether the future is hidden.
        most: see SEGMENT_ELEMENTS; 0 for no limit.
        dtype: of the scores.
        device: of masks.
    """

    parts: tuple[Union[Band, Columns], ...]
    time: int
    tokens: int
    extra: int
    given: int
    is_causal: bool
    most: int
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


def plans(q: Tensor, k: Tensor, scores: Scores, given: int = 0) -> list[tuple[slice, tuple[Segment, ...]]]:
    """All segments of each group of heads, for q (B, N, T, D) and k (B, N, K, D), with keys `given` by sequence."""
    most = SEGMENT_ELEMENTS if q.device.type == "cpu" else 0
    in_numbers = (scores.extra, given, scores.is_causal, most)
    return [
        (heads, _segments(Key(parts, q.size(-2), k.size(-2) - scores.extra, *in_numbers, q.dtype, q.device)))
        for heads, parts in _groups(scores, q.size(1))
    ]


def count(q: Sequence[int], k: Sequence[int], scores: Scores, device: str = "cpu") -> int:
    """Entries of all rows, without keys given by sequence, from the shapes of q and k."""
    in_numbers = (scores.extra, 0, scores.is_causal, SEGMENT_ELEMENTS if device == "cpu" else 0)
    keys = ((heads, Key(parts, int(q[2]), int(k[2]) - scores.extra, *in_numbers))
            for heads, parts in _groups(scores, q[1]))  # fmt: skip
    return q[0] * sum((heads.stop - heads.start) * _count(key) for heads, key in keys)


def _groups(scores: Scores, heads: int) -> Iterator[tuple[slice, tuple[Union[Band, Columns], ...]]]:
    """By group: (its heads, the parts of its mask)."""
    first = 0
    for number, parts in scores.mask.groups if scores.mask else ((heads, (Band(None, None),)),):
        yield slice(first, first + number), parts
        first += number


@functools.lru_cache(maxsize=PLANS)
def _segments(key: Key) -> tuple[Segment, ...]:
    return tuple(_cut(key, with_tensors=True))


@functools.lru_cache(maxsize=PLANS)
def _count(key: Key) -> int:
    return sum(segment.length * segment.width for segment in _cut(key, with_tensors=False))


def _cut(key: Key, with_tensors: bool) -> Iterator[Segment]:
    shapes = [_Shape.of(band, key) for band in key.parts if isinstance(band, Band)]
    if not shapes:
        shapes = [_Shape(_NOTHING, 1, min(16, key.time), 0, 0)]  # it has queries' own places
    unit = math.lcm(*(shape.unit for shape in shapes))
    offset = key.tokens - key.time
    first = offset // unit * unit
    end = first + math.ceil((key.tokens - first) / unit) * unit
    widest = _segment(first, end, shapes, key, with_tensors=False).width
    length = max(unit, key.most // widest // unit * unit) if key.most else end - first
    for start in range(first, end, length):
        yield _segment(start, min(end, start + length), shapes, key, with_tensors)


class _Shape(NamedTuple):
    """How a band's tiles look.

    Attributes:
        band: what they show.
        step: S.
        rows: R, or 0 for as many as a segment has.
        before, after: columns, in steps, in front of the first query and behind the last; None for all there are.
    """

    band: Band
    step: int
    rows: int
    before: Optional[int]
    after: Optional[int]

    @property
    def unit(self) -> int:
        """Places by which segments of it are counted."""
        return self.step * max(1, self.rows)

    @classmethod
    def of(cls, band: Band, key: Key) -> "_Shape":
        before, after, step, block = band
        after = 0 if key.is_causal else after
        is_limited = before is not None and after is not None
        if block and not (is_limited and (before + after) * step < block):
            if block <= key.time:  # several small blocks share a tile
                return cls(band, 1, block * max(1, TILE // 2 // block), 0, 0)
            step, (before, after) = 1, ((block - 1) * (side != 0) for side in (before, after))
        whole = not is_limited or key.time < 2 * TILE * step or (TILE + before + after) * step >= key.tokens
        return cls(band, step, 0 if whole else TILE, before, after)

    def columns(self, first: int, end: int, tokens: int) -> tuple[int, int, int]:
        """In steps, for a segment from place `first` to `end`: the first column of its first tile, R and C."""
        start = first // self.step
        if self.rows:
            return start - self.before, self.rows, self.before + self.rows + self.after
        # One tile covers no more than all keys, and the places of its queries, some of which are none.
        stop, last = end // self.step, math.ceil(max(end, tokens) / self.step)
        low = 0 if self.before is None else max(0, start - self.before)
        high = last if self.after is None else min(last, stop + self.after)
        return low, stop - start, high - low


def _segment(first: int, end: int, shapes: list[_Shape], key: Key, with_tensors: bool) -> Segment:
    width = 0

    def slot(size: int) -> slice:
        nonlocal width
        width += size
        return slice(width - size, width)

    parts: list[Part] = []
    if key.extra:
        parts.append(Picked(range(key.tokens, key.tokens + key.extra), False, slot(key.extra)))
    if key.given:
        parts.append(Picked(None, True, slot(key.given)))
    before = tuple(part for part in key.parts if isinstance(part, Columns))
    if places := _picked(before, min(end, key.tokens) if key.is_causal else key.tokens):
        parts.append(Picked(places, True, slot(len(places))))
    if with_tensors:
        parts = [_with_tensors(part, first, end, key) for part in parts]
    for shape in shapes:
        start, rows, number = shape.columns(first, end, key.tokens)
        count = (end - first) // shape.step // rows
        tiles = Tiles(shape.step, count, rows, number, start * shape.step, first // shape.step - start, slot(number))
        parts.append(_masked(tiles, shape.band, before, first, key) if with_tensors else tiles)
        before = (*before, shape.band)
    offset = key.tokens - key.time
    low, high = max(first, offset), min(end, key.tokens)
    inside = slice(low - first, high - first)
    return Segment(first, end - first, slice(low - offset, high - offset), inside, tuple(parts), width)


def _picked(columns: Sequence[Columns], end: int) -> Sequence[int]:
    """Places before `end` that all queries see."""
    places = {place for part in columns for place in range(min(end, part.first))}
    repeated = [part for part in columns if part.period]
    return sorted(
        places | {at for part in repeated for at in range(end) if at % part.period >= part.period - part.last}
    )


def _with_tensors(part: Picked, first: int, end: int, key: Key) -> Picked:
    """The same with its tensors: places, and what is in the future of some queries."""
    if part.places is None:
        return part
    places, hidden = torch.tensor(part.places, device=key.device), None
    if part.are_tokens and key.is_causal:
        hidden = places > torch.arange(first, end, device=key.device)[:, None]
        hidden = _minus_infinity(hidden, key.dtype) if bool(hidden.any()) else None
    return replace(part, places=places, hidden=hidden)


def _masked(tiles: Tiles, band: Band, before: tuple[Union[Band, Columns], ...], first: int, key: Key) -> Tiles:
    """The same tiles with what is left out of them, from what the parts of the mask say."""
    step, count, rows = tiles.step, tiles.count, tiles.rows
    like = {"device": key.device, "dtype": torch.int32}
    remainder, tile = (torch.arange(size, **like) for size in (step, count))
    begin = tile[:, None] * rows
    queries = first + (begin + torch.arange(rows, **like)) * step + remainder[:, None, None]
    keys = tiles.first + (begin + torch.arange(tiles.columns, **like)) * step + remainder[:, None, None]
    seen = band.shows(queries, keys) & ((keys >= 0) & (keys < key.tokens))[..., None, :]
    if key.is_causal:
        seen &= keys[..., None, :] <= queries[..., None]
    for part in before:
        seen &= ~part.shows(queries, keys)
    return replace(tiles, mask=_mask_of(~seen, key.dtype))


def _mask_of(hidden: Tensor, dtype: torch.dtype) -> Mask:
    """From (S, G, R, C), True at what is left out."""
    tiles = hidden.flatten(0, 1)
    common = tiles[len(tiles) // 2]
    differ = (tiles != common).flatten(1).any(1).nonzero()[:, 0].tolist()
    shows_more = any(bool((common & ~tiles[number]).any()) for number in differ[: _MOST_EXCEPTIONS + 1])
    if len(differ) > _MOST_EXCEPTIONS or shows_more:
        return Mask(full=_minus_infinity(hidden, dtype))
    exceptions = tuple((number, _minus_infinity(tiles[number], dtype)) for number in differ)
    runs = tuple(_runs(common.any(0).tolist()))
    return Mask(_minus_infinity(common, dtype) if runs else None, runs, exceptions)


def _runs(flags: list[bool]) -> Iterator[slice]:
    for flag, run in groupby(range(len(flags)), flags.__getitem__):
        if flag:
            first, *others = run
            yield slice(first, [first, *others][-1] + 1)


def _minus_infinity(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
