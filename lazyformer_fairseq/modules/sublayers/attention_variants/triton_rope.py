"""The rotation of queries and keys on a GPU, as one Triton kernel.

Separate torch operations would read and write the vectors several times in single precision. The kernel reads and
writes each vector once, in its own precision, and rotates it in single precision. It runs before attention rather than
inside the attention kernels, because they load each key once per tile of queries and would rotate it just as often.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazyformer_fairseq.modules.attention.lazy_block import empty_heads
from lazyformer_fairseq.modules.attention.triton_kernels import block_of_head, contiguous_rows
from lazyformer_fairseq.modules.attention.triton_passes import head_of, load_rows, own_tile, store_rows

ROWS_PER_TILE = 64


@triton.jit(do_not_specialize=["time"])
def rotation_kernel(
    x,
    cos,
    sin,
    rotated,
    x_strides,
    cos_strides,
    sin_strides,
    rotated_strides,
    time,
    heads,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotate the two halves of each vector in a tile of ROWS vectors."""
    start, _, b, n = own_tile(time, heads, ROWS)
    x_head = head_of(x, x_strides, b, n)
    x_stride = x_strides[2]
    first = load_rows(x_head, start, x_stride, time, HALF, ROWS, BLOCK_D, False).to(tl.float32)
    second = load_rows(x_head + HALF, start, x_stride, time, HALF, ROWS, BLOCK_D, False).to(tl.float32)
    cosines = load_rows(head_of(cos, cos_strides, b, n), start, cos_strides[2], time, HALF, ROWS, BLOCK_D, False)
    sines = load_rows(head_of(sin, sin_strides, b, n), start, sin_strides[2], time, HALF, ROWS, BLOCK_D, False)
    first_rotated = first * cosines - second * sines
    second_rotated = second * cosines + first * sines
    store_rows(rotated, rotated_strides, b, n, start, first_rotated, time, HALF, ROWS, BLOCK_D)
    store_rows(rotated + HALF, rotated_strides, b, n, start, second_rotated, time, HALF, ROWS, BLOCK_D)


@torch.library.custom_op("lazyformer::rotate", mutates_args=())
def rotate(x_BNTD: Tensor, cos_BNTD: Tensor, sin_BNTD: Tensor) -> Tensor:
    """Rotate dimensions i and i + D / 2 of each vector as a pair.

    Args:
        x_BNTD: the vectors, in single or half precision.
        cos_BNTD: the cosines of the angles in float32, of which the first D / 2 dimensions are read. Dimensions may be
            expanded.
        sin_BNTD: the sines, of which the last D / 2 dimensions are read.

    Returns:
        The rotated vectors (B, N, T, D), in the precision of the vectors.
    """
    _, heads, time, size = x_BNTD.shape
    half = size // 2
    x_BNTD = contiguous_rows(x_BNTD)
    sin_of_second_half = sin_BNTD[..., half:]
    rotated = empty_heads(x_BNTD)
    tiles_per_head = triton.cdiv(time, ROWS_PER_TILE)
    grid = (tiles_per_head * x_BNTD.size(0) * heads,)
    with torch.cuda.device_of(x_BNTD):  # Triton launches on the current device
        rotation_kernel[grid](
            x_BNTD,
            cos_BNTD,
            sin_of_second_half,
            rotated,
            x_BNTD.stride()[:3],
            cos_BNTD.stride()[:3],
            sin_of_second_half.stride()[:3],
            rotated.stride()[:3],
            time,
            heads,
            HALF=half,
            BLOCK_D=block_of_head(half),
            ROWS=ROWS_PER_TILE,
        )
    return rotated


@rotate.register_fake
def _(x_BNTD: Tensor, _cos_BNTD: Tensor, _sin_BNTD: Tensor) -> Tensor:
    return empty_heads(x_BNTD)


def _save_angles(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    _, cos_BNTD, sin_BNTD = inputs
    ctx.save_for_backward(cos_BNTD, sin_BNTD)


def _rotate_back(ctx: Any, d_rotated: Tensor) -> tuple[Tensor, None, None]:
    cos_BNTD, sin_BNTD = ctx.saved_tensors
    return rotate(d_rotated, cos_BNTD, -sin_BNTD), None, None


rotate.register_autograd(_rotate_back, setup_context=_save_angles)
