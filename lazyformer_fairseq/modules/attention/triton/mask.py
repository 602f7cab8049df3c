"""What a mask shows, as the Triton kernels read it: for each tile that a program keeps, a list of tiles to meet."""

import functools
from typing import Any, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention.mask_blocks import Blocks, Numbers, blocks_of, listed
from lazyformer_fairseq.modules.attention.masks import AttentionMask
from lazyformer_fairseq.modules.attention.scores import Scores

NO_MASK = dict(mask=None, seen=None, BANDS=0, COLUMNS=0)
_KEPT = 64  # lists: of each length of text, kind of mask and kind of kernel


def mask_arguments(scores: Scores, q: Tensor, size: tuple[int, int], keeps_keys: bool) -> dict[str, Any]:
    """Of a kernel whose tiles have so many queries and keys, of which a program keeps the keys, or the queries.

    `mask` is (tiles, counts, bands, columns): tiles (S, N, kept tiles, others) in int32, in each row first those that
    all see, then those with a mask; counts (S, N, kept tiles, 2): of the first, and of both. S is B with keys that all
    queries see, 1 without.
    """
    if scores.mask is None:
        return NO_MASK
    heads, time = q.shape[1:3]
    key = scores.mask, heads, time, size, q.device
    if scores.seen_BK is None:
        tiles, counts = _lists(*key, keeps_keys)
    else:
        tiles, counts = _listed(_blocks(*key), keeps_keys, _by_tile(scores.seen_BK, size[1]))
    bands, columns = numbers = _numbers(scores.mask, heads, q.device)
    seen = None if scores.seen_BK is None else scores.seen_BK.to(torch.uint8).contiguous()
    return dict(mask=(tiles, counts, *numbers), seen=seen, BANDS=bands.size(1), COLUMNS=columns.size(1))


@functools.lru_cache(maxsize=_KEPT)
def _numbers(mask: AttentionMask, heads: int, device: torch.device) -> Numbers:
    return Numbers.of(mask, heads, device)


@functools.lru_cache(maxsize=_KEPT)
def _blocks(mask: AttentionMask, heads: int, time: int, size: tuple[int, int], device: torch.device) -> Blocks:
    found = blocks_of(mask, time, time, 0, False, size, device)
    return Blocks(*(part.expand(heads, -1, -1) for part in found))


@functools.lru_cache(maxsize=_KEPT)
def _lists(
    mask: AttentionMask, heads: int, time: int, size: tuple[int, int], device: torch.device, keeps_keys: bool
) -> tuple[Tensor, Tensor]:
    return _listed(_blocks(mask, heads, time, size, device), keeps_keys)


def _listed(blocks: Blocks, keeps_keys: bool, seen_BC: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    shown, whole = blocks.shown[None], blocks.whole[None]
    if seen_BC is not None:
        shown = shown | seen_BC[:, None, None]
    if keeps_keys:
        shown, whole = shown.mT, whole.mT
    tiles, counts = listed(shown, whole)
    return tiles.contiguous(), counts.contiguous()


def _by_tile(flags_BK: Tensor, keys: int) -> Tensor:
    """(B, C): whether a tile of keys has one."""
    return torch.nn.functional.pad(flags_BK, (0, -flags_BK.size(1) % keys)).unflatten(1, (-1, keys)).any(-1)
