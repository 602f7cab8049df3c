"""Attention masks, which determine the keys that a query sees, apart from padding and causality.

For each group of heads, a mask is a union of simple parts. The position of a key is its index among the K keys. The
position of the i-th of T queries is the position of its own key, K - T + i.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Optional, TypeVar, Union

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Places = TypeVar("Places", Tensor, np.ndarray)


class Band(NamedTuple):
    """A band of keys around the query.

    Attributes:
        before: The number of steps back that a query sees; None for no limit.
        after: The number of steps ahead that a query sees; None for no limit.
        dilation: The number of positions per step. Keys between two steps are not seen.
        block: The block length, if queries only see keys in their own block; 0 for no blocks.
    """

    before: Optional[int]
    after: Optional[int]
    dilation: int = 1
    block: int = 0

    def shows(self, queries_T: Places, keys_K: Places) -> Places:
        """Return a mask (T, K), True where a query sees a key; the arguments are their positions."""
        queries_T1 = queries_T[:, None]
        ahead_TK = keys_K - queries_T1
        seen_TK = ahead_TK % self.dilation == 0
        if self.before is not None:
            seen_TK &= ahead_TK >= -self.before * self.dilation
        if self.after is not None:
            seen_TK &= ahead_TK <= self.after * self.dilation
        if self.block:
            seen_TK &= keys_K // self.block == queries_T1 // self.block
        return seen_TK


class Columns(NamedTuple):
    """Keys that every query sees.

    Attributes:
        first: The number of visible keys at the start.
        period: The length of a period; 0 for no periods.
        last: The number of visible keys at the end of each period.
    """

    first: int = 0
    period: int = 0
    last: int = 0

    def shows(self, queries_T: Places, keys_K: Places) -> Places:
        """Return a mask (T, K), True where a query sees a key; the arguments are their positions."""
        seen_K = keys_K < self.first
        if self.period:
            place_in_period = keys_K % self.period
            seen_K = seen_K | (place_in_period >= self.period - self.last)
        is_query = queries_T >= 0  # True for all queries; it gives the result its shape
        return seen_K & is_query[:, None]


Part = Union[Band, Columns]
_NO_LIMIT = -1
_SAMPLED = 128  # the number of queries that `visible_fraction` samples


def shown_by(parts: Sequence[Part], queries_T: Places, keys_K: Places) -> Places:
    """Return a mask (T, K), True where any part shows a key to a query; the arguments are their positions."""
    seen_TK = parts[0].shows(queries_T, keys_K)
    for part in parts[1:]:
        seen_TK = seen_TK | part.shows(queries_T, keys_K)
    return seen_TK


class AttentionMask(NamedTuple):
    """An attention mask that consists of parts for each group of heads. A query sees every key that any part shows.

    Attributes:
        groups: For each group of consecutive heads, the number of heads and the parts of their mask.
    """

    groups: tuple[tuple[int, tuple[Part, ...]], ...]

    def dense(self, time: int, keys: int, device: torch.device) -> Tensor:
        """Return a mask (1, T, K), or (N, T, K) if heads differ; True where a query sees a key, ignoring causality."""
        places = torch.arange(keys, device=device)
        queries = places[keys - time :]
        by_group = []
        for heads, parts in groups_of(self):
            seen_TK = shown_by(parts, queries, places)
            by_group.append(seen_TK.expand(heads, -1, -1))
        return torch.cat(by_group)

    @property
    def reach(self) -> Optional[int]:
        """The number of positions back that queries see; None if there is no limit or it differs between queries."""
        reach = 0
        for _, parts in self.groups:
            for part in parts:
                if isinstance(part, Columns) or part.before is None or part.block:
                    return None
                reach = max(reach, part.before * part.dilation)
        return reach

    def within(self, reach: int) -> "AttentionMask":
        """Return a copy that also hides keys more than `reach` positions back. All parts must be bands."""
        groups = []
        for heads, parts in self.groups:
            shortened = tuple(_shortened(part, reach) for part in parts)
            groups.append((heads, shortened))
        return AttentionMask(tuple(groups))

    def flat(self) -> list[int]:
        """Flatten the mask into a list of integers for torch's operators; :func:`mask_of` is the inverse."""
        numbers = []
        for heads, parts in self.groups:
            numbers += [heads, len(parts)]
            for part in parts:
                numbers.append(len(part))
                numbers += [_NO_LIMIT if field is None else field for field in part]
        return numbers


def groups_of(mask: Optional[AttentionMask]) -> tuple[tuple[int, tuple[Part, ...]], ...]:
    """Return the number of heads and the mask parts of each group of heads.

    If all heads have the same mask, a single head represents them, so the number is 1.
    """
    if mask is None:
        everything = Band(None, None)
        return ((1, (everything,)),)
    if len(mask.groups) > 1:
        return mask.groups
    ((_, parts),) = mask.groups
    return ((1, parts),)


def _shortened(part: Part, reach: int) -> Band:
    assert isinstance(part, Band), "columns are seen from everywhere"
    steps = reach // part.dilation
    if part.before is not None:
        steps = min(part.before, steps)
    return part._replace(before=steps)


@functools.lru_cache(maxsize=256)
def count_pairs(mask: AttentionMask, time: int, keys: int, is_causal: bool) -> int:
    """Count the query-key pairs that a mask shows, summed over heads and ignoring padding."""
    return sum(heads * _count_of_head(parts, time, keys, is_causal) for heads, parts in mask.groups)


def _count_of_head(parts: tuple[Part, ...], time: int, keys: int, is_causal: bool) -> int:
    if all(isinstance(part, Band) and not part.block for part in parts):  # only the distance matters
        furthest = 1 if is_causal else time
        ahead = torch.arange(1 - keys, furthest)
        (is_shown,) = shown_by(parts, ahead.new_zeros(1), ahead)
        last_query = (keys - ahead).clamp(max=keys)
        first_query = (-ahead).clamp(min=keys - time)
        pairs = last_query - first_query  # the number of pairs at each distance
        return int((pairs * is_shown).sum())
    places = torch.arange(keys)
    queries = places[keys - time :]
    at_once = max(1, 2**22 // keys)
    return sum(_count_shown(parts, some, places, is_causal) for some in queries.split(at_once))


@functools.lru_cache(maxsize=1024)  # every forward pass calls this
def visible_fraction(mask: AttentionMask, time: int, keys: int, is_causal: bool) -> float:
    """Estimate the fraction of query-key pairs that a mask shows, in (0, 1] and rounded to three digits.

    The fraction is estimated from a sample of queries, because it is needed for many text lengths. The sampled
    positions are multiples of the golden ratio modulo 1, scaled to the text length, so they are spread evenly and do
    not align with the period of a mask.
    """
    places = torch.arange(keys, device="cpu")
    if time <= _SAMPLED:
        queries = places[keys - time :]
    else:
        steps = torch.arange(1, _SAMPLED + 1, dtype=torch.double, device="cpu")
        golden_ratio = math.sqrt(5) / 2 - 0.5
        queries = keys - time + (steps * golden_ratio % 1 * time).long()
    shown = 0
    pairs = 0
    for heads, parts in mask.groups:
        shown += heads * _count_shown(parts, queries, places, is_causal)
        pairs += heads * len(queries) * keys
    fraction = max(1, shown) / pairs
    return float(f"{fraction:.3g}")


def _count_shown(parts: tuple[Part, ...], queries: Tensor, places: Tensor, is_causal: bool) -> int:
    """Count the visible pairs among the queries and keys at these positions."""
    seen = shown_by(parts, queries, places)
    if is_causal:
        seen &= places <= queries[:, None]
    return int(seen.sum())


def mask_of(numbers: Sequence[int]) -> Optional[AttentionMask]:
    """Rebuild a mask from the output of :meth:`AttentionMask.flat`; return None for an empty list."""
    if not numbers:
        return None
    rest = iter(numbers)
    groups = []
    for heads in rest:
        num_parts = next(rest)
        parts = tuple(_read_part(rest) for _ in range(num_parts))
        groups.append((heads, parts))
    return AttentionMask(tuple(groups))


def _read_part(rest: Iterator[int]) -> Part:
    num_fields = next(rest)
    fields = list(islice(rest, num_fields))
    if num_fields == len(Columns._fields):
        return Columns(*fields)
    before, after, *others = fields
    band = Band(None, None, *others)
    if before != _NO_LIMIT:
        band = band._replace(before=before)
    if after != _NO_LIMIT:
        band = band._replace(after=after)
    return band


# The rest of this file is for GPU kernels: it computes which blocks of queries and keys a mask shows, and encodes the
# parts of a mask as numbers. A block consists of consecutive queries and an equal number of consecutive keys. Nothing
# here synchronizes with the GPU.

_PAIRS_AT_ONCE = 2**26  # query-key pairs, whose distances take half a gigabyte
_ENDLESS = 2**30  # stands for no limit; the sum of two such numbers fits into 32 bits


class Numbers(NamedTuple):
    """The parts of each head's mask as int32 tensors. Heads with fewer parts are padded with parts that show nothing.

    Attributes:
        bands_NX4: For each :class:`Band`, the minimum and maximum number of positions that a key may be ahead of the
            query, the dilation, and the block length.
        columns_NX3: For each :class:`Columns`, its attributes `first`, `period` and `last`.
    """

    bands_NX4: Tensor
    columns_NX3: Tensor

    @classmethod
    def of(cls, mask: Optional[AttentionMask], heads: int, device: torch.device) -> "Numbers":
        """Encode a mask for `heads` heads. Without a mask, all heads see all keys."""
        bands: list[list[tuple[int, ...]]] = []
        columns: list[list[tuple[int, ...]]] = []
        groups = groups_of(mask)
        for number, parts in groups:
            alike = number
            if len(groups) == 1:
                alike = heads
            bands_of_head: list[tuple[int, ...]] = []
            columns_of_head: list[tuple[int, ...]] = []
            for part in parts:
                if isinstance(part, Band):
                    bands_of_head.append(_numbers_of(part))
                else:
                    columns_of_head.append((part.first, max(1, part.period), part.last))
            bands += [bands_of_head] * alike
            columns += [columns_of_head] * alike
        return cls(
            bands_NX4=_table(bands, (1, 0, 1, _ENDLESS), device),
            columns_NX3=_table(columns, (0, 1, 0), device),
        )


def _numbers_of(band: Band) -> tuple[int, int, int, int]:
    least = -_ENDLESS
    if band.before is not None:
        least = -band.before * band.dilation
    most = _ENDLESS
    if band.after is not None:
        most = band.after * band.dilation
    return least, most, band.dilation, band.block or _ENDLESS


def _table(by_head: list[list[tuple[int, ...]]], nothing: tuple[int, ...], device: torch.device) -> Tensor:
    """Build a tensor (N, parts, fields), padding heads that have fewer parts with the part `nothing`."""
    most = max(map(len, by_head))
    padded = [rows + [nothing] * (most - len(rows)) for rows in by_head]
    table = torch.tensor(padded, dtype=torch.int32)
    return table.reshape(len(by_head), most, len(nothing)).to(device)


class Blocks(NamedTuple):
    """The visibility of each block of queries and keys under a mask, (1, R, C), or (N, R, C) if heads differ.

    Padding is ignored.

    Attributes:
        shown: True if any query of the block sees any of its keys.
        whole: True if all queries of the block see all of its keys. Blocks that extend beyond the last query or key are
            not whole.
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
    """Compute the visibility of the blocks of T queries and K keys.

    Args:
        mask: The mask; None to show all keys.
        time: T, the number of queries.
        keys: K, the number of keys, including those that are not tokens.
        extra: The number of keys that are not tokens. They follow the tokens, and every query sees them.
        is_causal: Whether later keys are hidden from queries.
        size: The block size, in queries and in keys.
        device: The device of the result.
    """
    tokens = keys - extra
    offset = tokens - time
    places = torch.arange(keys + -keys % size, device=device)
    is_token = places < tokens
    is_extra = (places >= tokens) & (places < keys)

    # To save memory, only a few rows of blocks are computed at once. A compiled graph fuses all steps, so it can
    # compute all rows at once.
    if torch.compiler.is_compiling():
        at_once = time
    else:
        at_once = max(1, _PAIRS_AT_ONCE // len(places) // size) * size

    found: list[Tensor] = []
    for first in range(0, time, at_once):
        rows = torch.arange(first, min(time, first + at_once), device=device)
        queries = rows + offset
        by_group = []
        for heads, parts in groups_of(mask):
            seen = shown_by(parts, queries, places) & is_token
            if is_causal:
                seen &= places <= queries[:, None]
            seen = F.pad(seen | is_extra, (0, 0, 0, -len(rows) % size))
            blocks = seen.unflatten(1, (-1, size)).unflatten(0, (-1, size))
            shown = blocks.any(3).any(1)
            whole = blocks.all(3).all(1)
            both = torch.stack([shown, whole])
            by_group.append(both.unsqueeze(1).expand(-1, heads, -1, -1))
        found.append(torch.cat(by_group, 1))
    shown, whole = torch.cat(found, 2)
    return Blocks(shown, whole)
