"""The ``l`` sublayer: attention with own values on a distribution computed below (LazyFormer, section 2, Figure 1)."""

from collections.abc import Mapping
from typing import ClassVar, Optional

from torch import Tensor, nn

from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.memory_costs import Memory, Pass
from lazyformer_fairseq.modules.sublayers.attention_heads import (
    AttentionSublayer,
    count_attention_memory,
    count_remembered,
    merge_heads,
    with_memory,
)
from lazyformer_fairseq.modules.sublayers.attention_variant import build_values
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState, SublayerOptions
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import CAUSAL, DISTRIBUTION, ENCODER
from lazyformer_fairseq.patterns.sizes import Sizes


class LazyAttention(AttentionSublayer):
    """P V with an output projection, P the distribution of the nearest sublayer below that has one."""

    direction = ENCODER
    projections: ClassVar[Mapping[str, tuple[str, int, int]]] = {"v": ("v_proj", 0, 1)}
    has_bias: ClassVar[bool] = True  # of the two projections
    has_queries = has_keys = False

    def __init__(self, options: SublayerOptions, planned: PlannedSublayer):
        super().__init__(options, planned)
        self.v_proj = Linear(options.embed_dim, options.embed_dim, self.has_bias)
        self.out_proj = Linear(options.embed_dim, options.embed_dim, self.has_bias)
        producer = planned.producer
        self.value_makers = (
            nn.ModuleDict() if producer is None else build_values(self.variant_options(options, producer.values))
        )
        self.start_copies()

    @classmethod
    def count_memory(cls, sizes: Sizes, planned: PlannedSublayer, run: Pass) -> Memory:
        """Values, output, and what the back end keeps."""
        values, inputs = count_remembered(sizes, run)
        found = count_attention_memory(sizes, planned.producer, run, values, is_consumer=True)
        return found._replace(kept=found.kept + inputs)

    def forward(
        self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, SharedState]:
        """Attends with the given distribution, which includes biases and masks already."""
        x_BKC, distribution = with_memory(memory_BMC, x_BTC), below[DISTRIBUTION]
        if hasattr(distribution, "project"):  # it has a way that is cheaper
            v_BKC, distribution = distribution.project(x_BKC, self.v_proj)
        else:
            v_BKC = self.v_proj(x_BKC)
        values = self.make_values(x_BKC, v_BKC)
        dropout = self.dropout if self.training else 0.0
        return self.out_proj(merge_heads(distribution.attend(values, dropout))), {}


class CausalLazyAttention(LazyAttention):
    """Like Transformer-XL's attention, its projections have no biases."""

    direction = CAUSAL
    has_bias = False
