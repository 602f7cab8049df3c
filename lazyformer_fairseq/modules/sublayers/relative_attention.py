"""The ``s`` sublayer of a causal model: Transformer-XL's attention (Dai et al., 2019, section 3.3 and appendix B)."""

import math
from collections.abc import Mapping
from typing import ClassVar, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.memory_costs import Memory, Pass
from lazyformer_fairseq.modules.sublayers.attention_heads import (
    ChoosingAttention,
    count_attention_memory,
    count_remembered,
    split_heads,
    with_memory,
)
from lazyformer_fairseq.modules.sublayers.attention_variant import Attention, projections
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState, SublayerOptions
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import CAUSAL
from lazyformer_fairseq.patterns.sizes import Sizes


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


class RelativeAttention(ChoosingAttention):
    """softmax(((Q + u) K^T + shift((Q + v) R^T)) / sqrt(D)) V, R the projected distances, without biases.

    Keys and values come from memory and segment, queries from the segment alone. u and v belong to the decoder, which
    shares them between all its sublayers. Its settings may make something else of it.
    """

    direction = CAUSAL
    projections: ClassVar[Mapping[str, tuple[str, int, int]]] = {
        "q": ("q_proj", 0, 1),
        "k": ("kv_proj", 0, 2),
        "v": ("kv_proj", 1, 2),
    }

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__(options, planned)
        embed_dim = options.embed_dim
        self.q_proj = Linear(embed_dim, embed_dim, bias=False) if self.has_queries else None
        self.kv_proj = Linear(embed_dim, (self.has_keys + 1) * embed_dim, bias=False)
        compares = self.has_queries and self.has_keys
        self.position_proj = Linear(embed_dim, embed_dim, bias=False) if compares else None
        self.out_proj = Linear(embed_dim, embed_dim, bias=False)
        self.start_copies()

    @classmethod
    def count_memory(cls, sizes: Sizes, planned: PlannedSublayer, run: Pass) -> Memory:
        """Queries that meet keys and queries that meet distances, these, keys, values, memory and input, output."""
        kept = projections(planned.values)
        of_keys, inputs = count_remembered(sizes, run)
        queries = run.tokens(sizes.embed_dim) * ("queries" in kept) * (1 + ("keys" in kept))
        projected = queries + of_keys * (1 + ("keys" in kept))
        found = count_attention_memory(sizes, planned, run, projected)
        distances = (run.keys + 1) * sizes.embed_dim * run.number if "keys" in kept else 0
        return found._replace(kept=found.kept + inputs + distances)

    def forward(
        self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, SharedState]:
        if memory_BMC is not None:
            if self.why_no_memory:
                raise UserError(f"{memory_BMC.size(1)} remembered tokens: {self.why_no_memory}; give --mem-len 0")
            memory_BMC, shared = self._within_reach(memory_BMC, x_BTC.size(1), shared)
        x_BKC = with_memory(memory_BMC, x_BTC)
        c = x_BTC.size(-1)
        k_BKC, v_BKC = self.kv_proj(x_BKC).split((c * self.has_keys, c), dim=-1)
        q, scores = self._queries(x_BTC, shared)
        k, values = split_heads(k_BKC, self.num_heads), self.make_values(x_BKC, v_BKC)
        return self.attend(Attention(x_BTC, x_BKC, q, k, values, scores, shared.positions), shared)

    def _within_reach(self, memory_BMC: Tensor, time: int, shared: Context) -> tuple[Tensor, Context]:
        """Leaves out memory that no query sees, and its positions.

        What others read of this sublayer is about all keys, so then all stay.
        """
        length = memory_BMC.size(1)
        kept = min([choice.reach for choice in self.choices.values() if choice.reach is not None], default=length)
        if kept >= length or self.consumers or self.is_key_producer:
            return memory_BMC, shared
        positions = shared.positions._replace(encoded=shared.positions.encoded[-(kept + time + 1) :])
        return memory_BMC[:, length - kept :], shared._replace(positions=positions)

    def _queries(self, x_BTC: Tensor, shared: Context) -> tuple[Tensor, Scores]:
        """Q + u, and the scores with positions; without keys to compare with, there is nothing to add for distances."""
        if self.q_proj is None:
            return split_heads(x_BTC[..., :0], self.num_heads), shared.scores
        q_BTC = self.q_proj(x_BTC)
        if self.position_proj is not None:
            return with_distances(q_BTC, self.position_proj, self.num_heads, shared)
        q = q_BTC.unflatten(-1, (self.num_heads, -1)) + shared.positions.content_bias
        return q.transpose(1, 2), shared.scores


def with_distances(q_BTC: Tensor, position_proj: Linear, num_heads: int, shared: Context) -> tuple[Tensor, Scores]:
    """Q + u (B, N, T, D), and the scores with positions, of projected queries."""
    positions = shared.positions
    assert positions is not None, "a causal decoder gives its sublayers positions"
    q = q_BTC.unflatten(-1, (num_heads, -1))
    distances_NKD = position_proj(positions.encoded).unflatten(-1, (num_heads, -1)).transpose(0, 1)
    about_positions = ((q + positions.position_bias) / math.sqrt(q.size(-1))).transpose(1, 2)
    about_content = (q + positions.content_bias).transpose(1, 2)
    return about_content, shared.scores.with_positions(about_positions, distances_NKD)
