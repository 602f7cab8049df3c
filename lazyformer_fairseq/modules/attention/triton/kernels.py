"""Back end ``fused`` on a GPU: attention of a lazy block in Triton, of which nothing n x n is written to memory.

The four functions of :class:`~lazyformer_fairseq.modules.attention.block_kernels.BlockKernels`; what an ``s`` saves
is the log-sum-exp of each row of scores, (B, N, T) in float32, natural logarithm. In units of one n x n x D product per
head, a forward pass takes 2, the gradient of an ``l`` 2, and that of an ``s`` with m - 1 readers m + 4. Any T and
D <= 128, fp16, bf16 and fp32; q, k, values and gradients may be views of any strides.
"""

import math
from typing import Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention.block_kernels import empty_output
from lazyformer_fairseq.modules.attention.triton.backward import (
    key_side_kernel,
    query_side_kernel,
    value_gradient_kernel,
)
from lazyformer_fairseq.modules.attention.triton.forward import forward_kernel
from lazyformer_fairseq.modules.attention.triton.launch import launch
from lazyformer_fairseq.modules.attention.triton.near_bias import NearBias
from lazyformer_fairseq.modules.attention.triton.tiles import FEWEST_KEYS, MOST_LAYERS, tiles_for


def attend_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Optional[Tensor],
    bucket_by_distance: Optional[Tensor],
    far: int,
    lengths: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """(P V, log-sum-exp) of an ``s``: (B, N, T, D) and (B, N, T)."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    bias = NearBias.of(table, bucket_by_distance, far, q)
    return _forward(q, k, v, lse, bias, lengths, reuses=False), lse


def reuse_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    table: Optional[Tensor],
    bucket_by_distance: Optional[Tensor],
    far: int,
    lengths: Optional[Tensor],
) -> Tensor:
    """P V (B, N, T, D) of an ``l``: exp(scores - lse) V, without a running maximum or rescaling."""
    bias = NearBias.of(table, bucket_by_distance, far, q)
    return _forward(q, k, v, lse, bias, lengths, reuses=True)


def value_gradient(
    q: Tensor,
    k: Tensor,
    d_output: Tensor,
    lse: Tensor,
    table: Optional[Tensor],
    bucket_by_distance: Optional[Tensor],
    far: int,
    lengths: Optional[Tensor],
) -> Tensor:
    """dV = P^T dO (B, N, T, D) of an ``l``."""
    bias = NearBias.of(table, bucket_by_distance, far, q)
    dv = empty_output(d_output)
    launch(
        value_gradient_kernel,
        "BLOCK_K",
        q,
        strided=dict(q=_rows(q), k=_rows(k), d_output=_rows(d_output), dv=dv),
        tiles=tiles_for("value_gradient", q),
        lse=lse,
        lengths=lengths,
        bias=bias.rows,
        reach=bias.reach,
    )
    return dv


def block_gradient(
    q: Tensor,
    k: Tensor,
    values: list[Tensor],
    d_outputs: list[Tensor],
    delta: Tensor,
    lse: Tensor,
    table: Optional[Tensor],
    bucket_by_distance: Optional[Tensor],
    far: int,
    lengths: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV of the first values, and d table ((0,) without one): one pass for an ``s`` and all its readers.

    Programs add to dQ in float32, in any order. Under ``torch.use_deterministic_algorithms(True)`` a kernel of its own
    computes dQ, always alike, for m + 1 products more. Everything else is always summed in the same order.
    """
    if len(values) > MOST_LAYERS:  # all gradients are linear in (dO_i, delta)
        first, rest = slice(MOST_LAYERS), slice(MOST_LAYERS, None)
        with_delta = block_gradient(
            q, k, values[first], d_outputs[first], delta, lse, table, bucket_by_distance, far, lengths
        )
        without = block_gradient(
            q, k, values[rest], d_outputs[rest], torch.zeros_like(delta), lse, table, bucket_by_distance, far, lengths
        )
        return with_delta[0] + without[0], with_delta[1] + without[1], with_delta[2], with_delta[3] + without[3]
    alike = torch.are_deterministic_algorithms_enabled()
    batch, heads, time, _ = q.shape
    bias = NearBias.of(table, bucket_by_distance, far, q)
    band = bias.band_like(q)
    slots = math.ceil(time / FEWEST_KEYS)
    far_sums = None if band is None else q.new_zeros(batch, heads, slots, 2, dtype=torch.float32)
    dq = empty_output(q) if alike else empty_output(q.new_empty(()).float().expand(q.shape)).zero_()
    dk, dv = empty_output(q), empty_output(q)
    read = dict(q=_rows(q), k=_rows(k), values=tuple(map(_rows, values)), d_outputs=tuple(map(_rows, d_outputs)))
    shared = dict(lse=lse, delta=delta.contiguous(), lengths=lengths, bias=bias.rows, reach=bias.reach, M=len(values))
    launch(
        key_side_kernel,
        "BLOCK_K",
        q,
        strided=dict(**read, dq=dq, dk=dk, dv=dv),
        tiles=tiles_for("key_side", q, len(values)),
        set_to_zero=(() if alike else ("dq",)) + (() if band is None else ("far_sums",)),
        band=band,
        far_sums=far_sums,
        far_slots=slots,
        ADDS_DQ=not alike,
        **shared,
    )
    if alike:
        tiles = tiles_for("query_side", q, len(values))
        launch(query_side_kernel, "BLOCK_Q", q, strided=dict(**read, dq=dq), tiles=tiles, **shared)
    d_table = q.new_empty(0) if band is None else bias.table_gradient(band, far_sums, table)
    return dq.to(q.dtype), dk, dv, d_table


def _forward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, bias: NearBias, lengths: Optional[Tensor], reuses: bool
) -> Tensor:
    output = empty_output(v)
    launch(
        forward_kernel,
        "BLOCK_Q",
        q,
        strided=dict(q=_rows(q), k=_rows(k), v=_rows(v), o=output),
        tiles=tiles_for("reuse" if reuses else "attend", q),
        lse=lse,
        lengths=lengths,
        bias=bias.rows,
        reach=bias.reach,
        REUSES=reuses,
    )
    return output


def _rows(x: Tensor) -> Tensor:
    """The same, in memory such that the entries of a head lie side by side; views of projections do already."""
    return x if x.stride(-1) == 1 else x.contiguous()
