"""The ``s`` sublayer of an encoder: multi-head self-attention that can hand its distribution on."""

import math
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def split_heads(x_BTC: Tensor, num_heads: int) -> Tensor:
    """(B, T, C) -> (B, N, T, D)."""
    return x_BTC.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x_BNTD: Tensor) -> Tensor:
    """(B, N, T, D) -> (B, T, C)."""
    return x_BNTD.transpose(1, 2).flatten(2)


def with_memory(memory_BMC: Optional[Tensor], x_BTC: Tensor) -> Tensor:
    """What there is to attend to, (B, M + T, C): the previous segments' inputs, if any, then this one's."""
    return x_BTC if memory_BMC is None else torch.cat([memory_BMC, x_BTC], dim=1)


def attend(
    q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, bias: Optional[Tensor], dropout: float, keep_distribution: bool
) -> tuple[Tensor, Optional[Tensor]]:
    """softmax(QK^T / sqrt(D) + bias) V, (B, N, T, D), and, if it is to be kept, the distribution (B, N, T, K).

    Without it the fastest exact kernel there is computes the product, and the distribution need not be written to
    memory.

    Args:
        q_BNTD: queries.
        k_BNKD: keys.
        v_BNKD: values.
        bias: added to the scores, broadcastable to (B, N, T, K).
        dropout: on the distribution; what is returned is from before it.
        keep_distribution: whether to return the distribution, in the precision of the values.
    """
    if not keep_distribution:
        return F.scaled_dot_product_attention(q_BNTD, k_BNKD, v_BNKD, attn_mask=bias, dropout_p=dropout), None
    scores = torch.matmul(q_BNTD / math.sqrt(q_BNTD.size(-1)), k_BNKD.transpose(-2, -1))
    if bias is not None:
        scores = scores + bias
    at_least_single = torch.promote_types(scores.dtype, torch.float32)
    distribution = torch.softmax(scores, dim=-1, dtype=at_least_single).type_as(v_BNKD)
    return torch.matmul(F.dropout(distribution, dropout), v_BNKD), distribution


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raises ValueError where heads do not divide the width."""
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(f"{num_heads} attention heads do not divide an embedding dimension of {embed_dim}")


class SelfAttention(nn.Module):
    """softmax(QK^T / sqrt(D) + bias) V with an output projection; 4 C^2 + 4 C parameters.

    Args:
        embed_dim: C.
        num_heads: N; must divide C (ValueError).
        dropout: on the distribution.
        keeps_distribution: whether a lazy sublayer above reads the distribution. Where none does, the fastest exact
            kernel there is computes the product and the distribution is never written to memory.
    """

    attends = True

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, keeps_distribution: bool = False):
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.num_heads = num_heads
        self.dropout = dropout
        self.keeps_distribution = keeps_distribution
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(
        self, x_BTC: Tensor, distribution: Optional[Tensor], bias: Optional[Tensor]
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Attends.

        Args:
            x_BTC: input.
            distribution: of the sublayers below; replaced here.
            bias: added to the scores, broadcastable to (B, N, T, T); -inf at keys that are padding.

        Returns:
            The output (B, T, C) and, where kept, the distribution (B, N, T, T) before dropout, else None.
        """
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv_proj(x_BTC).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        attended, distribution = attend(q, k, v, bias, dropout, self.keeps_distribution)
        return self.out_proj(merge_heads(attended)), distribution
