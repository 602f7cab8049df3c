"""Triton kernels for attention with a learned bias by distance, and for lazy attention, which reuses a distribution.

Shapes: B sequences, N heads, T tokens, D head size, R reach of the bias.
"""

from typing import Optional

import torch
from torch import Tensor

from .modules_attention_interface import AttentionInputs
from .modules_attention_lazy_block import BlockKernels, SharedAttention, attend
from .modules_attention_scores import Scores
from .modules_attention_triton_kernels import InTriton

__all__ = ["SharedAttention", "attention"]

LARGEST_HEAD = 128
_KERNELS = BlockKernels("triton", InTriton())


def attention(
    q_BNTD: Tensor,
    k_BNTD: Tensor,
    v_BNTD: Tensor,
    bias_NR: Optional[Tensor] = None,
    lengths_B: Optional[Tensor] = None,
    consumers: int = 0,
) -> tuple[Tensor, SharedAttention]:
    """Return ``softmax(q k^T / sqrt(D) + bias) v``, and its distribution for layers that reuse it.

    Memory is linear in T, in both passes. The bias gets a gradient, which torch's own fused kernels do not compute. A
    layer that reuses the distribution (lazy attention, https://arxiv.org/abs/2102.12702) only computes the gradient of
    its values, and this call's backward pass computes the rest once for all layers::

        output, shared = attention(q, k, v, bias, consumers=1)
        output_above = shared.attend(v_above, dropout=0.0)

    Args:
        q_BNTD, k_BNTD, v_BNTD: Queries, keys and values, with any strides, in fp16, bf16 or fp32. D is at most 128.
        bias_NR: The bias (N, 2 R + 1) by distance, key minus query, from -R to R. Longer distances have the bias of
            the nearest end, as in T5. R should not exceed a few hundred. None for no bias.
        lengths_B: The number of tokens (an integer) of each sequence before its padding; None if there is none.
            Outputs at padding are meaningless.
        consumers: The number of layers that will call ``shared.attend``, each exactly once before the backward pass.

    Returns:
        The output (B, N, T, D), and the distribution for the layers above.

    Raises:
        ValueError: A shape or a type is not supported.
    """
    size = q_BNTD.size(-1)
    if not q_BNTD.shape == k_BNTD.shape == v_BNTD.shape or size > LARGEST_HEAD:
        raise ValueError(
            f"q, k and v must have the same shape (B, N, T, D) with D up to {LARGEST_HEAD}, not {tuple(q_BNTD.shape)}, "
            f"{tuple(k_BNTD.shape)} and {tuple(v_BNTD.shape)}"
        )
    if q_BNTD.dtype == torch.float64:
        raise ValueError("the kernels compute in fp16, bf16 or fp32, not in fp64")
    scores = Scores(lengths_B=lengths_B)
    if bias_NR is not None:
        heads, width = bias_NR.shape
        if heads != q_BNTD.size(1) or not width % 2:
            raise ValueError(
                f"the bias must be (heads, 2 R + 1) for {q_BNTD.size(1)} heads, not {tuple(bias_NR.shape)}"
            )
        reach = width // 2
        time = q_BNTD.size(2)
        distances = torch.arange(1 - time, time, device=q_BNTD.device)
        scores = scores.with_own(
            table_KN=bias_NR.t(),
            bucket_by_distance=distances.clamp(-reach, reach) + reach,
            far=reach,
        )
    return attend(_KERNELS, AttentionInputs(q_BNTD, k_BNTD, v_BNTD, scores, consumers=consumers))
