"""Back end ``fused`` on a GPU: attention of a lazy block in Triton, which writes nothing n x n to memory.

The four functions of :class:`~lazyformer_fairseq.modules.attention.block_kernels.BlockKernels`; what an ``s`` saves
is the log-sum-exp of each row of scores, (B, N, T) in float32, natural logarithm. In units of one n x n x D product per
head, a forward pass takes 2, the gradient of an ``l`` 2, and that of an ``s`` with m - 1 consumers m + 4. Any T and
D <= 128, fp16, bf16 and fp32; q, k, values and gradients may be views of any strides. With a mask programs meet the
tiles alone that it shows.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention.block_kernels import empty_heads, missing_gradients
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.attention.triton.backward_passes import (
    key_side_kernel,
    query_side_kernel,
    value_gradient_kernel,
)
from lazyformer_fairseq.modules.attention.triton.forward_pass import forward_kernel
from lazyformer_fairseq.modules.attention.triton.launch import (
    FEWEST_KEYS,
    MOST_LAYERS,
    launch,
    tiles_for,
    tiles_for_a_mask,
)
from lazyformer_fairseq.modules.attention.triton.mask import mask_arguments
from lazyformer_fairseq.modules.attention.triton.near_bias import NearBias


def attend_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """(P V, log-sum-exp) of an ``s``: (B, N, T, D) and (B, N, T)."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return _forward(q, k, v, lse, scores, reuses=False), lse


def reuse_forward(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scores: Scores) -> Tensor:
    """P V (B, N, T, D) of an ``l``: exp(scores - lse) V, without a running maximum or rescaling."""
    return _forward(q, k, v, lse, scores, reuses=True)


def value_gradient(q: Tensor, k: Tensor, d_output: Tensor, lse: Tensor, scores: Scores) -> Tensor:
    """dV = P^T dO (B, N, T, D) of an ``l``."""
    dv = empty_heads(k)
    launch(
        value_gradient_kernel,
        "BLOCK_K",
        q,
        strided=dict(q=_rows(q), k=_rows(k), d_output=_rows(d_output), dv=dv),
        **_tiles("value_gradient", q, scores, keeps_keys=True),
        **_read_by_all(lse, scores, NearBias.of(scores, q)),
    )
    return dv


def block_gradient(
    q: Tensor,
    k: Tensor,
    values: list[Tensor],
    d_outputs: list[Tensor],
    delta: Tensor,
    lse: Tensor,
    scores: Scores,
) -> list[Tensor]:
    """dQ, dK, dV of the first values, and those of ``scores.learned``: one pass for an ``s`` and all its consumers.

    Programs add to dQ in float32, in any order. Under ``torch.use_deterministic_algorithms(True)`` a kernel of its own
    computes dQ, the same every time, for m + 1 more products. All other sums always run in the same order.
    """
    if len(values) > MOST_LAYERS:  # all gradients are linear in (dO_i, delta)
        first, rest = slice(MOST_LAYERS), slice(MOST_LAYERS, None)
        d_q, d_k, d_v, d_table, *others = block_gradient(q, k, values[first], d_outputs[first], delta, lse, scores)
        more = block_gradient(q, k, values[rest], d_outputs[rest], torch.zeros_like(delta), lse, scores)
        return [d_q + more[0], d_k + more[1], d_v, d_table + more[3], *others]
    alike = torch.are_deterministic_algorithms_enabled()
    batch, heads, time, _ = q.shape
    bias = NearBias.of(scores, q)
    band = bias.band_like(q)
    slots = math.ceil(time / FEWEST_KEYS)
    far_sums = None if band is None else q.new_zeros(batch, heads, slots, 2, dtype=torch.float32)
    dq = empty_heads(q) if alike else empty_heads(q.new_empty(()).float().expand(q.shape)).zero_()
    dk, dv = empty_heads(q), empty_heads(q)
    read = dict(q=_rows(q), k=_rows(k), values=tuple(map(_rows, values)), d_outputs=tuple(map(_rows, d_outputs)))
    shared = dict(_read_by_all(lse, scores, bias), delta=delta.contiguous(), M=len(values))
    launch(
        key_side_kernel,
        "BLOCK_K",
        q,
        strided=dict(**read, dq=dq, dk=dk, dv=dv),
        **_tiles("key_side", q, scores, True, len(values)),
        set_to_zero=(() if alike else ("dq",)) + (() if band is None else ("far_sums",)),
        band=band,
        far_sums=far_sums,
        far_slots=slots,
        ADDS_DQ=not alike,
        **shared,
    )
    if alike:
        of_tiles = _tiles("query_side", q, scores, False, len(values))
        launch(query_side_kernel, "BLOCK_Q", q, strided=dict(**read, dq=dq), **of_tiles, **shared)
    d_table = q.new_empty(0) if band is None else bias.table_gradient(band, far_sums, scores.table_KN)
    return [dq.to(q.dtype), dk, dv, d_table, *missing_gradients(q, 4)]


def _forward(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scores: Scores, reuses: bool) -> Tensor:
    output = empty_heads(q)
    launch(
        forward_kernel,
        "BLOCK_Q",
        q,
        strided=dict(q=_rows(q), k=_rows(k), v=_rows(v), o=output),
        **_tiles("reuse" if reuses else "attend", q, scores, keeps_keys=False),
        **_read_by_all(lse, scores, NearBias.of(scores, q)),
        REUSES=reuses,
    )
    return output


def _tiles(kernel: str, q: Tensor, scores: Scores, keeps_keys: bool, layers: int = 1) -> dict[str, Any]:
    """Of a launch: tiles to choose from, and with a mask the lists for the one that there is."""
    tiles = tiles_for(kernel, q, layers) if scores.mask is None else tiles_for_a_mask(kernel, q, layers)
    return dict(tiles=tiles, **mask_arguments(scores, q, (tiles[0].queries, tiles[0].keys), keeps_keys))


def _read_by_all(lse: Tensor, scores: Scores, bias: NearBias) -> dict[str, Any]:
    return dict(lse=lse, lengths=scores.lengths_B, bias=bias.rows, reach=bias.reach)


def _rows(x: Tensor) -> Tensor:
    """The same, with the entries of a head side by side in memory, as in views of projections already."""
    return x if x.stride(-1) == 1 else x.contiguous()
