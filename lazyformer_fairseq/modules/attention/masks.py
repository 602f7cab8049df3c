"""Which keys a query may look at, beside padding and the future: a union of simple parts, for some heads each.

A key's place is its index among the K keys, a query's the place of its own key: K - T + i for the i-th of T.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor


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
        """(..., T, K): whether a query sees a key, from their places, (..., T) and (..., K)."""
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
        """(..., T, K): whether a query sees a key, from their places, (..., T) and (..., K)."""
        seen = keys_K < self.first
        if self.period:
            seen = seen | (keys_K % self.period >= self.period - self.last)
        return seen[..., None, :].expand(*queries_T.shape, -1)


Part = Union[Band, Columns]
_TYPES = (Band, Columns)
_NO_LIMIT = -1
_SAMPLED = 128  # queries


class AttentionMask(NamedTuple):
    """By groups of neighbouring heads, (number of heads, parts): a query sees what any of the parts shows it."""

    groups: tuple[tuple[int, tuple[Part, ...]], ...]

    def dense(self, time: int, keys: int, device: torch.device) -> Tensor:
        """(1, T, K), or (N, T, K) where heads differ: True at what is seen. The future is not taken out."""
        places = torch.arange(keys, device=device)
        by_group = []
        for heads, parts in self.groups:
            masks = [part.shows(places[keys - time :], places) for part in parts]
            by_group.append(torch.stack(masks).any(0).expand(heads if len(self.groups) > 1 else 1, -1, -1))
        return torch.cat(by_group)

    @property
    def reach(self) -> Optional[int]:
        """Positions before a query's own that it sees at most; None where there is no limit, or places count."""
        parts = [part for _, parts in self.groups for part in parts]
        if any(isinstance(part, Columns) or part.before is None or part.block for part in parts):
            return None
        return max(part.before * part.dilation for part in parts)

    def within(self, reach: int) -> "AttentionMask":
        """The same without keys more than so many positions back; of bands alone."""
        return AttentionMask(
            tuple((heads, tuple(_shortened(part, reach) for part in parts)) for heads, parts in self.groups)
        )

    def flat(self) -> list[int]:
        """As numbers, for torch operators; :func:`mask_of` reads them."""
        numbers = []
        for heads, parts in self.groups:
            numbers += [heads, len(parts)]
            for part in parts:
                numbers += [_TYPES.index(type(part)), *(_NO_LIMIT if field is None else field for field in part)]
        return numbers


def _shortened(part: Part, reach: int) -> Band:
    assert isinstance(part, Band), "columns are seen from everywhere"
    steps = reach // part.dilation
    return part._replace(before=steps if part.before is None else min(part.before, steps))


@functools.lru_cache(maxsize=256)
def count_pairs(mask: AttentionMask, time: int, keys: int, is_causal: bool) -> int:
    """Pairs of query and key that a mask shows, over all heads; padding apart."""
    places = torch.arange(keys)
    total = 0
    for queries in places[keys - time :].split(max(1, 2**22 // keys)):
        in_time = places <= queries[:, None] if is_causal else torch.ones(len(queries), keys, dtype=torch.bool)
        for heads, parts in mask.groups:
            masks = [part.shows(queries, places) for part in parts]
            total += heads * int((torch.stack(masks).any(0) & in_time).sum())
    return total


@functools.lru_cache(maxsize=1024)  # every forward pass asks
def count_share(mask: AttentionMask, time: int, keys: int, is_causal: bool) -> float:
    """Of all pairs of query and key, those that a mask shows: above 0, at most 1, with three digits.

    From a few queries, as texts have many lengths. Their places are spread as multiples of the golden ratio are:
    evenly, and not in step with a mask that repeats.
    """
    places = torch.arange(keys, device="cpu")
    if time <= _SAMPLED:
        queries = places[keys - time :]
    else:
        steps = torch.arange(1, _SAMPLED + 1, dtype=torch.double, device="cpu")
        queries = keys - time + (steps * (math.sqrt(5) / 2 - 0.5) % 1 * time).long()
    in_time = places <= queries[:, None] if is_causal else torch.ones(len(queries), keys, dtype=torch.bool)
    shown = sum(
        heads * int((torch.stack([part.shows(queries, places) for part in parts]).any(0) & in_time).sum())
        for heads, parts in mask.groups
    )
    pairs = sum(heads for heads, _ in mask.groups) * in_time.numel()
    return float(f"{max(1, shown) / pairs:.3g}")


def mask_of(numbers: Sequence[int]) -> Optional[AttentionMask]:
    """The mask whose :meth:`AttentionMask.flat` these are; None for no numbers."""
    return AttentionMask(tuple(_groups(iter(numbers)))) if numbers else None


def _groups(numbers: Iterator[int]) -> Iterator[tuple[int, tuple[Part, ...]]]:
    for heads in numbers:
        yield heads, tuple(_part(numbers) for _ in range(next(numbers)))


def _part(numbers: Iterator[int]) -> Part:
    kind = _TYPES[next(numbers)]
    fields = (next(numbers) for _ in kind._fields)
    return kind(*(None if field == _NO_LIMIT else field for field in fields))
