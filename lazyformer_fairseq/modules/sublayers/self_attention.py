"""The ``s`` sublayer of an encoder: multi-head self-attention that can hand its distribution on."""

from collections.abc import Mapping
from typing import ClassVar, Optional

from torch import Tensor

from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.memory_costs import Memory, Pass
from lazyformer_fairseq.modules.sublayers.attention_heads import (
    ChoosingAttention,
    count_attention_memory,
    split_heads,
)
from lazyformer_fairseq.modules.sublayers.attention_variant import Attention, projections
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState, SublayerOptions
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import ENCODER
from lazyformer_fairseq.patterns.sizes import Sizes


class SelfAttention(ChoosingAttention):
    """softmax(QK^T / sqrt(D) + bias) V with an output projection, or what its settings make of it."""

    direction = ENCODER
    projections: ClassVar[Mapping[str, tuple[str, int, int]]] = {
        "q": ("qkv_proj", 0, 3),
        "k": ("qkv_proj", 1, 3),
        "v": ("qkv_proj", 2, 3),
    }

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__(options, planned)
        self.qkv_proj = Linear(options.embed_dim, (self.has_queries + self.has_keys + 1) * options.embed_dim)
        self.out_proj = Linear(options.embed_dim, options.embed_dim)
        self.start_copies()

    @classmethod
    def parts(cls, planned: PlannedSublayer) -> Mapping[str, tuple[str, int, int]]:
        kept = projections(planned.values)
        names = ["q"] * ("queries" in kept) + ["k"] * ("keys" in kept) + ["v"]
        return {name: ("qkv_proj", number, len(names)) for number, name in enumerate(names)}

    @classmethod
    def count_memory(cls, sizes: Sizes, planned: PlannedSublayer, run: Pass) -> Memory:
        """Queries, keys, values, output, and what the back end keeps."""
        parts = len(projections(planned.values)) + 1
        return count_attention_memory(sizes, planned, run, parts * run.tokens(sizes.embed_dim))

    def forward(
        self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, SharedState]:
        q_BTC, k_BKC, v_BKC = self._project(x_BTC, shared.scores)
        q, k = split_heads(q_BTC, self.num_heads), split_heads(k_BKC, self.num_heads)
        values = self.make_values(x_BTC, v_BKC)
        return self.attend(Attention(x_BTC, x_BTC, q, k, values, shared.scores), shared)

    def _project(self, x_BTC: Tensor, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; (B, T, 0) where there are none."""
        for choice in self.choices.values():
            if (projected := choice.project(x_BTC, self.qkv_proj, scores)) is not None:
                return projected
        c = x_BTC.size(-1)
        return self.qkv_proj(x_BTC).split((c * self.has_queries, c * self.has_keys, c), dim=-1)
