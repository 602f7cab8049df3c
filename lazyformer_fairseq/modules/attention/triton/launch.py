"""How the Triton kernels are launched."""

import functools
import math
from typing import Any, Union

import torch
import triton
from torch import Tensor

from lazyformer_fairseq.modules.attention.triton.tiles import Tiles


def launch(
    kernel: triton.JITFunction,
    kept: str,
    q: Tensor,
    strided: dict[str, Union[Tensor, tuple[Tensor, ...]]],
    tiles: tuple[Tiles, ...],
    set_to_zero: tuple[str, ...] = (),
    **others: Any,
) -> None:
    """Runs a kernel of ``triton_forward`` or ``triton_backward``, one program for each tile of each head.

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
