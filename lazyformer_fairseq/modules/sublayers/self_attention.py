"""The ``s`` sublayer of an encoder: multi-head self-attention that can hand its distribution on."""

from collections.abc import Callable
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.modules.attention import ReusableAttention, attend
from lazyformer_fairseq.modules.attention.scores import ScoreBias
from lazyformer_fairseq.modules.linear import Linear


def split_heads(x_BTC: Tensor, num_heads: int) -> Tensor:
    """(B, T, C) -> (B, N, T, D)."""
    return x_BTC.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x_BNTD: Tensor) -> Tensor:
    """(B, N, T, D) -> (B, T, C)."""
    return x_BNTD.transpose(1, 2).flatten(2)


def with_memory(memory_BMC: Optional[Tensor], x_BTC: Tensor) -> Tensor:
    """What there is to attend to, (B, M + T, C): the previous segments' inputs, if any, then this one's."""
    return x_BTC if memory_BMC is None else torch.cat([memory_BMC, x_BTC], dim=1)


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raises ValueError where heads do not divide the width."""
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(f"{num_heads} attention heads do not divide an embedding dimension of {embed_dim}")


class AttentionContext(NamedTuple):
    """What all sublayers of one forward pass of an Encoder share.

    Attributes:
        bias: of the scores.
        backend: from the number of a distribution's readers to the name of the back end that computes it.
    """

    bias: ScoreBias
    backend: Callable[[int], str]


class SelfAttention(nn.Module):
    """softmax(QK^T / sqrt(D) + bias) V with an output projection; 4 C^2 + 4 C parameters.

    Args:
        embed_dim: C.
        num_heads: N; must divide C (ValueError).
        dropout: on the distribution.
        readers: how many lazy sublayers above read the distribution.
    """

    attends = True

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, readers: int = 0):
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.num_heads = num_heads
        self.dropout = dropout
        self.readers = readers
        self.qkv_proj = Linear(embed_dim, 3 * embed_dim)
        self.out_proj = Linear(embed_dim, embed_dim)

    def forward(
        self, x_BTC: Tensor, distribution: Optional[ReusableAttention], shared: AttentionContext
    ) -> tuple[Tensor, ReusableAttention]:
        """Attends.

        Args:
            x_BTC: input.
            distribution: of the sublayers below; replaced here.
            shared: bias and back end of this forward pass.

        Returns:
            The output (B, T, C) and the distribution, from before dropout.
        """
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv_proj(x_BTC).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        backend = shared.backend(self.readers)
        attended, distribution = attend(q, k, v, shared.bias, dropout, self.readers, backend)
        return self.out_proj(merge_heads(attended)), distribution
