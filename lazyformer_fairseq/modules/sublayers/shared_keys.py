"""The ``k`` sublayer: own queries on the keys and values of an ``s`` below (Brandon et al., 2024).

It saves two of four projections, and in a causal model the memory of its inputs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Optional

from torch import Tensor, nn

from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.memory_costs import Memory, Pass
from lazyformer_fairseq.modules.sublayers.attention_heads import (
    AttentionSublayer,
    count_attention_memory,
    count_remembered,
    split_heads,
)
from lazyformer_fairseq.modules.sublayers.attention_variant import Attention
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState, SublayerOptions
from lazyformer_fairseq.modules.sublayers.relative_attention import with_distances
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER, KEYS_AND_VALUES
from lazyformer_fairseq.patterns.sizes import Sizes


class SharedKeysAttention(AttentionSublayer):
    """softmax(QK^T / sqrt(D) + bias) V, K and V those of the nearest ``s`` below (cross-layer attention, section 2).

    It sees what that ``s`` sees: bias, padding, mask, persistent or projected keys, weights. It draws its own dropout.
    """

    direction = ENCODER
    attends = False  # the memory is in the keys that it reads
    projections: ClassVar[Mapping[str, tuple[str, int, int]]] = {"q": ("q_proj", 0, 1)}
    has_bias: ClassVar[bool] = True  # of its projections

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__(options, planned)
        self.settings = planned.shaper.settings  # they choose the back end
        self.choices = nn.ModuleDict()  # the s has made them
        self.q_proj = Linear(options.embed_dim, options.embed_dim, self.has_bias)
        self.out_proj = Linear(options.embed_dim, options.embed_dim, self.has_bias)

    @classmethod
    def count_memory(cls, sizes: Sizes, planned: PlannedSublayer, run: Pass) -> Memory:
        """Queries, output, what the back end keeps, and on ``eager`` copies of keys and values."""
        queries = run.tokens(sizes.embed_dim) * (2 if "positions" in run.features else 1)
        shaper = planned.shaper
        copies = 2 * count_remembered(sizes, run)[0] if run.back_end(shaper) == "eager" else 0
        found = count_attention_memory(sizes, replace(shaper, consumers=()), run, queries + copies)
        return found._replace(pending=0)

    def forward(
        self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, SharedState]:
        of_producer: Attention = below[KEYS_AND_VALUES]
        attention = self.with_queries(of_producer, self.q_proj(x_BTC), shared)
        y_BTC, _ = self.attend(replace(attention, x_BTC=x_BTC), shared)
        return y_BTC, {}

    def with_queries(self, attention: Attention, q_BTC: Tensor, shared: Context) -> Attention:
        """What the ``s`` attended with, with these projected queries."""
        return replace(attention, q_BNTD=split_heads(q_BTC, self.num_heads))


class CausalSharedKeysAttention(SharedKeysAttention):
    """With Transformer-XL's positions: distances projected anew, as its queries meet them; no biases."""

    direction = CAUSAL
    has_bias = False

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__(options, planned)
        self.position_proj = Linear(options.embed_dim, options.embed_dim, bias=False)

    def with_queries(self, attention: Attention, q_BTC: Tensor, shared: Context) -> Attention:
        q_BNTD, own = with_distances(q_BTC, self.position_proj, self.num_heads, shared)
        positions = {"position_queries_BNTD": own.position_queries_BNTD, "distances_NKD": own.distances_NKD}
        return replace(attention, q_BNTD=q_BNTD).with_scores(**positions)
