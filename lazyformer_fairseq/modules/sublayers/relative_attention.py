"""The ``s`` sublayer of a causal model: Transformer-XL's attention (Dai et al., 2019, section 3.3 and appendix B)."""

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention import eager
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.self_attention import check_heads, merge_heads, split_heads, with_memory


class RelativePositions(NamedTuple):
    """What all sublayers of one forward pass share; K = M + T keys, of memory and segment.

    Attributes:
        encoded: sinusoids (K + 1, C) of the distances K - 1, ..., 1, 0 and -1. The last is that of a key in the future,
            which nobody may look at; with it, the relative shift is a view.
        causal_mask: (T, K), 0 where a query may look, -inf at its future.
        content_bias: u (N, D), added to the queries that meet keys.
        position_bias: v (N, D), added to the queries that meet positions.
    """

    encoded: Tensor
    causal_mask: Tensor
    content_bias: Tensor
    position_bias: Tensor


def encode_distances(keys: int, embed_dim: int, clamp_len: int, like: Tensor) -> Tensor:
    """Sinusoids (K + 1, C) of the distances from K - 1 down to -1: sines in the first half, cosines in the second.

    Args:
        keys: K.
        embed_dim: C, even.
        clamp_len: all distances from here on are taken for this one; 0 for no such limit.
        like: a tensor of the device and precision wanted.
    """
    exact = torch.promote_types(like.dtype, torch.float32)  # half precision has no integers beyond 2048
    distances = torch.arange(keys - 1, -2, -1, device=like.device, dtype=exact)
    if clamp_len:
        distances = distances.clamp(max=clamp_len)
    exponents = torch.arange(0, embed_dim, 2, device=like.device, dtype=exact) / embed_dim
    angles = torch.outer(distances, 10000.0**-exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(like.dtype)


def causal_mask(time: int, keys: int, like: Tensor) -> Tensor:
    """(T, K): 0 where the key is in memory, or in the segment and not after the query; -inf elsewhere."""
    return torch.full((time, keys), float("-inf"), device=like.device, dtype=like.dtype).triu(keys - time + 1)


def relative_shift(by_distance: Tensor) -> Tensor:
    """Scores by query and distance -> scores by query and key, a view.

    Args:
        by_distance: contiguous (B, N, T, K + 1), the distances K - 1, ..., 0, -1.

    Returns:
        (B, N, T, K): in row i and column j what `by_distance` has in row i for the distance between the i-th query and
        the j-th key, M + i - j; where j is in the future, a number that means nothing.
    """
    time, keys = by_distance.size(-2), by_distance.size(-1) - 1
    # Entry (i, j) is entry (i, T - 1 - i + j) of the input, and so number T - 1 + i K + j of its flat rows of K + 1.
    return by_distance.flatten(-2)[..., time - 1 : time - 1 + time * keys].unflatten(-1, (time, keys))


class RelativeAttention(nn.Module):
    """softmax(((Q + u) K^T + shift((Q + v) R^T)) / sqrt(D)) V, R the projected distances; 5 C^2 parameters, no biases.

    Keys and values are of memory and segment, queries of the segment alone. u and v belong to the decoder, which
    shares them between all its sublayers.

    Args:
        embed_dim: C.
        num_heads: N; must divide C (ValueError).
        dropout: on the distribution.
        keeps_distribution: whether a lazy sublayer above reads the distribution.
    """

    attends = True

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, keeps_distribution: bool = False):
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.num_heads = num_heads
        self.dropout = dropout
        self.keeps_distribution = keeps_distribution
        self.q_proj = Linear(embed_dim, embed_dim, bias=False)
        self.kv_proj = Linear(embed_dim, 2 * embed_dim, bias=False)
        self.position_proj = Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = Linear(embed_dim, embed_dim, bias=False)

    def forward(
        self,
        x_BTC: Tensor,
        distribution: Optional[eager.StoredDistribution],
        shared: RelativePositions,
        memory_BMC: Optional[Tensor] = None,
    ) -> tuple[Tensor, Optional[eager.StoredDistribution]]:
        """Attends.

        Args:
            x_BTC: input.
            distribution: of the sublayers below; replaced here.
            shared: positions, mask and biases, for T queries and M + T keys.
            memory_BMC: what `x_BTC` was in the previous segments; None where there are none (M = 0).

        Returns:
            The output (B, T, C) and, where kept, the distribution (B, N, T, M + T) before dropout, else None.
        """
        q = self.q_proj(x_BTC).unflatten(-1, (self.num_heads, -1))
        k, v = (
            split_heads(part, self.num_heads) for part in self.kv_proj(with_memory(memory_BMC, x_BTC)).chunk(2, dim=-1)
        )
        r_NKD = self.position_proj(shared.encoded).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        about_positions = ((q + shared.position_bias) / math.sqrt(q.size(-1))).transpose(1, 2)
        by_distance = torch.matmul(about_positions, r_NKD.transpose(-2, -1))
        bias = relative_shift(by_distance) + shared.causal_mask
        dropout = self.dropout if self.training else 0.0
        about_content = (q + shared.content_bias).transpose(1, 2)
        if self.keeps_distribution:
            distribution = eager.distribution(about_content, k, bias, v.dtype)
            attended = distribution.attend(v, dropout)
        else:
            distribution = None
            attended = F.scaled_dot_product_attention(about_content, k, v, attn_mask=bias, dropout_p=dropout)
        return self.out_proj(merge_heads(attended)), distribution
