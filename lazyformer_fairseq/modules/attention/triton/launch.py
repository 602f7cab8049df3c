"""How the Triton kernels are launched, and with which tiles.

A GPU tries the tiles once for each kind of input and keeps the fastest. Lists are short and hold what fits:
``tests/modules/attention/triton/kernels_in_compiler.py`` has the compiler say how many registers and how much shared
memory each takes. A GPU passes over tiles too large for it; the first of each list fits an A100.
"""

import functools
import math
import os
from typing import Any, NamedTuple, Union

import torch
import triton
from torch import Tensor


class Tiles(NamedTuple):
    """Queries and keys of a tile, the warps that share it, and how many tiles load from memory at once."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def config(self) -> triton.Config:
        """The same as Triton's config."""
        sizes = {"BLOCK_Q": self.queries, "BLOCK_K": self.keys}
        return triton.Config(sizes, num_warps=self.warps, num_stages=self.stages)


FEWEST_KEYS = 32  # of all tiles here
MOST_LAYERS = 6  # whose values fit side by side
_ANYWHERE = (Tiles(32, 32, 8, 1),)  # in the interpreter, in single precision
# {kernel: {largest D, as a power of two: {largest m: tiles}}}
_TILES = {
    "attend": {
        64: {1: (Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3))},
        128: {1: (Tiles(128, 64, 8, 2), Tiles(128, 128, 8, 2), Tiles(64, 64, 8, 2))},
    },
    "reuse": {
        64: {1: (Tiles(128, 64, 4, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3))},
        128: {1: (Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3))},
    },
    "value_gradient": {
        64: {1: (Tiles(64, 128, 8, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3))},
        128: {1: (Tiles(64, 128, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 3))},
    },
    "key_side": {
        64: {
            3: (Tiles(64, 64, 8, 2), Tiles(64, 128, 8, 2), Tiles(32, 64, 8, 2)),
            6: (Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 2)),
        },
        128: {
            2: (Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 2)),
            6: (Tiles(32, 32, 4, 2),),
        },
    },
    "query_side": {  # of deterministic runs, which take the first: no trial
        64: {3: (Tiles(128, 64, 8, 2),), 6: (Tiles(64, 32, 4, 2),)},
        128: {1: (Tiles(64, 64, 8, 2),), 6: (Tiles(64, 32, 4, 1),)},
    },
}


def tiles_for(kernel: str, q: Tensor, layers: int = 1) -> tuple[Tiles, ...]:
    """Tiles to choose from, most promising first.

    Args:
        kernel: a key of the table above.
        q: queries (B, N, T, D), for D and the precision.
        layers: m, of a kernel that goes over all values of a block.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" or q.element_size() > 2:
        return _ANYWHERE
    by_layers = _TILES[kernel][64 if q.size(-1) <= 64 else 128]
    return next(tiles for most, tiles in by_layers.items() if layers <= most)


def tiles_for_a_mask(kernel: str, q: Tensor, layers: int = 1) -> tuple[Tiles, ...]:
    """The one choice with a mask, whose lists are of tiles of one size; a small one, as its mask takes registers."""
    smallest = min(tiles_for(kernel, q, layers), key=lambda tiles: tiles.queries * tiles.keys)
    return (smallest._replace(queries=min(64, smallest.queries)),)


def launch(
    kernel: triton.JITFunction,
    kept: str,
    q: Tensor,
    strided: dict[str, Union[Tensor, tuple[Tensor, ...]]],
    tiles: tuple[Tiles, ...],
    set_to_zero: tuple[str, ...] = (),
    **others: Any,
) -> None:
    """Runs a kernel, one program for each tile of each head.

    Args:
        kernel: which.
        kept: the tile that a program keeps while it walks over the others: BLOCK_Q or BLOCK_K.
        q: its queries (B, N, T, D), for the sizes.
        strided: arguments that come with an argument NAME_strides: (B, N, T, D), or several of them.
        tiles: to choose from; the first if torch must use deterministic algorithms.
        set_to_zero: arguments that programs add to; every trial of tiles starts with zeros in them.
        others: the kernel's other arguments.
    """
    batch, heads, time, size = q.shape
    if torch.are_deterministic_algorithms_enabled():
        tiles = tiles[:1]
    with torch.cuda.device_of(q):  # Triton launches on the current device
        _tuned(kernel, tiles, set_to_zero)[lambda sizes: (triton.cdiv(time, sizes[kept]) * batch * heads,)](
            **strided,
            **{f"{name}_strides": _strides(tensor) for name, tensor in strided.items()},
            **others,
            scale=1 / math.sqrt(size),
            time=time,
            heads=heads,
            time_class=time.bit_length(),
            HEAD=size,
            BLOCK_D=max(16, triton.next_power_of_2(size)),
        )


@functools.cache
def _tuned(kernel: triton.JITFunction, tiles: tuple[Tiles, ...], set_to_zero: tuple[str, ...]) -> Any:
    """The kernel; its first call tries the tiles for each class of T (by powers of two), m, D and dtype."""
    configs = [choice.config for choice in tiles]
    key = [name for name in ("time_class", "M", "HEAD") if name in kernel.arg_names]
    return triton.autotune(configs, key=key, reset_to_zero=set_to_zero)(kernel)


def _strides(tensors: Union[Tensor, tuple[Tensor, ...]]) -> tuple:
    """Strides of B, N and T."""
    if isinstance(tensors, tuple):
        return tuple(map(_strides, tensors))
    return tensors.stride()[:3]
