"""Masks: the keys a query may look at, beside padding and the future, as a union of simple parts for some heads each.

A key's place is its index among the K keys, a query's the place of its own key: K - T + i for the i-th of T.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.nn import functional as F


class Band(NamedTuple):
    """Keys around the query.

    Attributes:
        before: how many steps back a key may be; None for no limit.
        after: how many steps ahead; None for no limit.
        dilation: positions of a step: keys between two steps are not seen.
        block: see keys of the query's own block of so many positions alone; 0 for no blocks.
    """

    before: Optional[int]
    after: Optional[int]
    dilation: int = 1
    block: int = 0

    def shows(self, queries_T: Tensor, keys_K: Tensor) -> Tensor:
        """Return whether queries see keys, (..., T, K), from their places (..., T) and (..., K): tensors or arrays."""
        ahead = keys_K[..., None, :] - queries_T[..., None]
        seen = ahead % self.dilation == 0
        if self.before is not None:
            seen &= ahead >= -self.before * self.dilation
        if self.after is not None:
            seen &= ahead <= self.after * self.dilation
        if self.block:
            seen &= (keys_K // self.block)[..., None, :] == (queries_T // self.block)[..., None]
        return seen


class Columns(NamedTuple):
    """Keys that every query sees: the first `first`, and the last `last` of every `period` positions (0 for none)."""

    first: int = 0
    period: int = 0
    last: int = 0

    def shows(self, queries_T: Tensor, keys_K: Tensor) -> Tensor:
        """Return whether queries see keys, (..., T, K), from their places (..., T) and (..., K): tensors or arrays."""
        seen = keys_K < self.first
        if self.period:
            seen = seen | (keys_K % self.period >= self.period - self.last)
        return seen[..., None, :] & (queries_T >= 0)[..., None]


Part = Union[Band, Columns]
_NO_LIMIT = -1
_SAMPLED = 128  # queries


class AttentionMask(NamedTuple):
    """By groups of neighbouring heads, (number of heads, parts): a query sees what any of the parts shows it."""

    groups: tuple[tuple[int, tuple[Part, ...]], ...]

    def dense(self, time: int, keys: int, device: torch.device) -> Tensor:
        """Return what is seen, (1, T, K), or (N, T, K) where heads differ; the future is not taken out."""
        places = torch.arange(keys, device=device)
        by_group = []
        for heads, parts in self.groups:
            masks = [part.shows(places[keys - time :], places) for part in parts]
            by_group.append(torch.stack(masks).any(0).expand(heads if len(self.groups) > 1 else 1, -1, -1))
        return torch.cat(by_group)

    @property
    def reach(self) -> Optional[int]:
        """Return how many positions before its own a query sees; None where there is no limit, or places count."""
        parts = [part for _, parts in self.groups for part in parts]
        if any(isinstance(part, Columns) or part.before is None or part.block for part in parts):
            return None
        return max(part.before * part.dilation for part in parts)

    def within(self, reach: int) -> "AttentionMask":
        """Return the same mask, of bands alone, without keys more than so many positions back."""
        return AttentionMask(
            tuple((heads, tuple(_shortened(part, reach) for part in parts)) for heads, parts in self.groups)
        )

    def flat(self) -> list[int]:
        """Return the mask as numbers, for torch's operators; :func:`mask_of` reads them."""
        numbers = []
        for heads, parts in self.groups:
            numbers += [heads, len(parts)]
            for part in parts:
                numbers += [len(part), *(_NO_LIMIT if field is None else field for field in part)]
        return numbers


def _shortened(part: Part, reach: int) -> Band:
    assert isinstance(part, Band), "columns are seen from everywhere"
    steps = reach // part.dilation
    return part._replace(before=steps if part.before is None else min(part.before, steps))


@functools.lru_cache(maxsize=256)
def count_pairs(mask: AttentionMask, time: int, keys: int, is_causal: bool) -> int:
    """Return how many pairs of query and key a mask shows, over all heads; padding apart."""
    return sum(heads * _count_of_head(parts, time, keys, is_causal) for heads, parts in mask.groups)


def _count_of_head(parts: tuple[Part, ...], time: int, keys: int, is_causal: bool) -> int:
    if all(isinstance(part, Band) and not part.block for part in parts):  # the distance alone decides
        ahead = torch.arange(1 - keys, 1 if is_causal else time)
        shown = torch.stack([part.shows(ahead.new_zeros(1), ahead)[0] for part in parts]).any(0)
        pairs = (keys - ahead).clamp(max=keys) - (-ahead).clamp(min=keys - time)  # with that distance
        return int((pairs * shown).sum())
    places = torch.arange(keys)
    one = AttentionMask(((1, parts),))
    some = places[keys - time :].split(max(1, 2**22 // keys))
    return sum(_count_shown(one, queries, places, is_causal) for queries in some)


@functools.lru_cache(maxsize=1024)  # every forward pass asks
def count_share(mask: AttentionMask, time: int, keys: int, is_causal: bool) -> float:
    """Return the share of all pairs of query and key that a mask shows: above 0, at most 1, with three digits.

    From a few queries, as texts have many lengths. Their places are spread as multiples of the golden ratio are:
    evenly, and not in step with a mask that repeats.
    """
    places = torch.arange(keys, device="cpu")
    if time <= _SAMPLED:
        queries = places[keys - time :]
    else:
        steps = torch.arange(1, _SAMPLED + 1, dtype=torch.double, device="cpu")
        queries = keys - time + (steps * (math.sqrt(5) / 2 - 0.5) % 1 * time).long()
    pairs = sum(heads for heads, _ in mask.groups) * len(queries) * keys
    return float(f"{max(1, _count_shown(mask, queries, places, is_causal)) / pairs:.3g}")


def _count_shown(mask: AttentionMask, queries: Tensor, places: Tensor, is_causal: bool) -> int:
    """Return how many pairs of some queries and all keys are shown, from their places."""
    if is_causal:
        in_time = places <= queries[:, None]
    else:
        in_time = torch.ones(len(queries), len(places), dtype=torch.bool)
    return sum(
        heads * int((torch.stack([part.shows(queries, places) for part in parts]).any(0) & in_time).sum())
        for heads, parts in mask.groups
    )


def mask_of(numbers: Sequence[int]) -> Optional[AttentionMask]:
    """Return the mask whose :meth:`AttentionMask.flat` these are; None for no numbers."""
    rest = iter(numbers)

    def part() -> Part:
        fields = [None if number == _NO_LIMIT else number for number in islice(rest, next(rest))]
        if len(fields) == len(Band._fields):
            return Band(*fields)
        return Columns(*fields)

    groups = tuple((heads, tuple(part() for _ in range(next(rest)))) for heads in rest)
    if groups:
        return AttentionMask(groups)
    return None


# For kernels of a GPU: which blocks of queries and keys a mask shows, and its parts as numbers. A block is so many
# neighbouring queries against as many keys. Nothing waits for a GPU.

_PAIRS_AT_ONCE = 2**26  # of query and key: half a gigabyte of their distances
_ENDLESS = 2**30  # in place of no limit; sums of two stay within 32 bits


class Numbers(NamedTuple):
    """A mask's parts by head, int32. Heads with fewer parts have some that show nothing.

    Attributes:
        bands_NX4: of each band (least, most, dilation, block): how far a key may be ahead of the query, in positions,
            in steps of how many, and within which blocks of positions.
        columns_NX3: of each :class:`Columns` (first, period, last).
    """

    bands_NX4: Tensor
    columns_NX3: Tensor

    @classmethod
    def of(cls, mask: Optional[AttentionMask], heads: int, device: torch.device) -> "Numbers":
        """Return the numbers of so many heads; without a mask they see all."""
        bands = [[_numbers_of(part) for part in parts if isinstance(part, Band)] for parts in _by_head(mask, heads)]
        columns = [
            [(part.first, max(1, part.period), part.last) for part in parts if isinstance(part, Columns)]
            for parts in _by_head(mask, heads)
        ]
        return cls(_table(bands, (1, 0, 1, _ENDLESS), device), _table(columns, (0, 1, 0), device))


class Blocks(NamedTuple):
    """By block of queries and of keys, (1, R, C) or (N, R, C) where heads differ; padding apart.

    Attributes:
        shown: whether some query of it sees some key of it.
        whole: where all queries see all keys; those that reach beyond the last query or key are not.
    """

    shown: Tensor
    whole: Tensor


def blocks_of(
    mask: Optional[AttentionMask],
    time: int,
    keys: int,
    extra: int,
    is_causal: bool,
    size: int,
    device: torch.device,
) -> Blocks:
    """Return the blocks of an attention over T queries and K keys.

    Args:
        mask: None for all keys.
        time: T.
        keys: K, those that are no tokens included.
        extra: how many are no tokens: they stand behind the tokens, and every query sees them.
        is_causal: whether the future is hidden.
        size: queries of a block, and keys.
        device: of the result.
    """
    places = torch.arange(keys + -keys % size, device=device)
    is_token = places < keys - extra
    offset = keys - extra - time
    # Some rows of blocks at a time; a graph, which joins all steps, takes all.
    if torch.compiler.is_compiling():
        at_once = time
    else:
        at_once = max(1, _PAIRS_AT_ONCE // len(places) // size) * size
    found: list[Tensor] = []
    for first in range(0, time, at_once):
        rows = torch.arange(first, min(time, first + at_once), device=device)
        by_group = []
        for heads, parts in _groups(mask):
            seen = torch.stack([part.shows(rows + offset, places) for part in parts]).any(0) & is_token
            if is_causal:
                seen &= places <= rows[:, None] + offset
            seen = F.pad(seen | ((places >= keys - extra) & (places < keys)), (0, 0, 0, -len(rows) % size))
            blocks = seen.unflatten(1, (-1, size)).unflatten(0, (-1, size))
            both = torch.stack([blocks.any(3).any(1), blocks.all(3).all(1)])
            by_group.append(both.unsqueeze(1).expand(-1, heads, -1, -1))
        found.append(torch.cat(by_group, 1))
    return Blocks(*torch.cat(found, 2))


def _groups(mask: Optional[AttentionMask]) -> tuple[tuple[int, tuple[Part, ...]], ...]:
    """Return (heads, parts) of each group; one head stands for all where they see alike."""
    if mask is None:
        return ((1, (Band(None, None),)),)
    if len(mask.groups) > 1:
        return mask.groups
    return ((1, mask.groups[0][1]),)


def _by_head(mask: Optional[AttentionMask], heads: int) -> Iterator[tuple[Part, ...]]:
    for number, parts in _groups(mask):
        yield from [parts] * (heads if mask is None or len(mask.groups) == 1 else number)


def _limits(band: Band) -> tuple[int, int]:
    """Return the least and the most that a key may be ahead of the query."""
    if band.before is None:
        least = -_ENDLESS
    else:
        least = -band.before * band.dilation
    return least, _ENDLESS if band.after is None else band.after * band.dilation


def _numbers_of(band: Band) -> tuple[int, int, int, int]:
    return (*_limits(band), band.dilation, band.block or _ENDLESS)


def _table(by_head: Sequence[list[tuple[int, ...]]], nothing: tuple[int, ...], device: torch.device) -> Tensor:
    most = max(map(len, by_head))
    padded = [[*rows, *[nothing] * (most - len(rows))] for rows in by_head]
    return torch.tensor(padded, dtype=torch.int32).reshape(len(by_head), most, len(nothing)).to(device)
