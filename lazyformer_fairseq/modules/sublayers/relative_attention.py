"""The ``s`` sublayer of a causal model: Transformer-XL's attention (Dai et al., 2019, section 3.3 and appendix B)."""

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.attention_heads import AttentionSublayer, split_heads, with_memory
from lazyformer_fairseq.modules.sublayers.interface import Context, Flops, HandedOn, Settings
from lazyformer_fairseq.patterns.sizes import Sizes


class RelativePositions(NamedTuple):
    """What all sublayers of one forward pass share; K = M + T keys, of memory and segment.

    Attributes:
        encoded: sinusoids (K + 1, C) of the distances K - 1, ..., 1, 0 and -1. The last belongs to a key in the future,
            which no query may look at; with it, the relative shift is a view.
        content_bias: u (N, D), added to the queries that meet keys.
        position_bias: v (N, D), added to the queries that meet positions.
    """

    encoded: Tensor
    content_bias: Tensor
    position_bias: Tensor


def encode_distances(keys: int, embed_dim: int, clamp_len: int, like: Tensor) -> Tensor:
    """Sinusoids (K + 1, C) of the distances from K - 1 down to -1: sines in the first half, cosines in the second.

    Args:
        keys: K.
        embed_dim: C, even.
        clamp_len: distances beyond this one count as it; 0 for no such limit.
        like: a tensor with the device and precision to use.
    """
    exact = torch.promote_types(like.dtype, torch.float32)  # half precision has no integers beyond 2048
    distances = torch.arange(keys - 1, -2, -1, device=like.device, dtype=exact)
    if clamp_len:
        distances = distances.clamp(max=clamp_len)
    exponents = torch.arange(0, embed_dim, 2, device=like.device, dtype=exact) / embed_dim
    angles = torch.outer(distances, 10000.0**-exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(like.dtype)


class RelativeAttention(AttentionSublayer):
    """softmax(((Q + u) K^T + shift((Q + v) R^T)) / sqrt(D)) V, R the projected distances, without biases.

    Keys and values come from memory and segment, queries from the segment alone. u and v belong to the decoder, which
    shares them between all its sublayers.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, readers: int = 0):
        super().__init__(embed_dim, num_heads, dropout, readers)
        self.q_proj = Linear(embed_dim, embed_dim, bias=False)
        self.kv_proj = Linear(embed_dim, 2 * embed_dim, bias=False)
        self.position_proj = Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = Linear(embed_dim, embed_dim, bias=False)

    @classmethod
    def count_parameters(cls, sizes: Sizes, settings: Settings) -> int:
        """5 C^2."""
        return 5 * sizes.embed_dim**2

    @classmethod
    def count_flops(cls, sizes: Sizes, settings: Settings, time: int, keys: int, batch: int) -> Flops:
        """Projects distances once for the whole batch; there is one more of them than keys, see `encoded`."""
        c, distances = sizes.embed_dim, keys + 1
        linear = 2 * batch * (2 * keys + 2 * time) * c * c + 2 * distances * c * c
        by_distance = 2 * batch * time * distances * c
        return Flops(linear + by_distance, 2 * (2 * batch * time * keys * c))

    def forward(
        self, x_BTC: Tensor, below: HandedOn, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, HandedOn]:
        positions = shared.positions
        assert positions is not None, "a causal decoder gives its sublayers positions"
        q = self.q_proj(x_BTC).unflatten(-1, (self.num_heads, -1))
        k, v = (
            split_heads(part, self.num_heads) for part in self.kv_proj(with_memory(memory_BMC, x_BTC)).chunk(2, dim=-1)
        )
        distances_NKD = self.position_proj(positions.encoded).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        about_positions = ((q + positions.position_bias) / math.sqrt(q.size(-1))).transpose(1, 2)
        about_content = (q + positions.content_bias).transpose(1, 2)
        scores = shared.scores.with_positions(about_positions, distances_NKD)
        return self.attend(about_content, k, v, scores, shared)
