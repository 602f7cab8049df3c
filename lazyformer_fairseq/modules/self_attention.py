"""The ``s`` sublayer: multi-head self-attention that can hand its distribution on."""

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
        if not self.keeps_distribution:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
            return self.out_proj(merge_heads(attended)), None
        scores = torch.matmul(q / math.sqrt(q.size(-1)), k.transpose(-2, -1))
        if bias is not None:
            scores = scores + bias
        distribution = torch.softmax(scores, dim=-1, dtype=torch.float32).type_as(v)
        attended = torch.matmul(F.dropout(distribution, dropout), v)
        return self.out_proj(merge_heads(attended)), distribution
