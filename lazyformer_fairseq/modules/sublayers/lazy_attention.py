"""The ``l`` sublayer: attention with own values on a distribution computed below (LazyFormer, section 2, Figure 1)."""

from typing import ClassVar, Optional

from torch import Tensor

from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.attention_heads import (
    AttentionSublayer,
    merge_heads,
    split_heads,
    with_memory,
)
from lazyformer_fairseq.modules.sublayers.interface import Context, Flops, HandedOn, Settings
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION
from lazyformer_fairseq.patterns.sizes import Sizes


class LazyAttention(AttentionSublayer):
    """P V with an output projection, P the distribution of the nearest sublayer below that has one."""

    has_bias: ClassVar[bool] = True  # of the two projections

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, readers: int = 0):
        super().__init__(embed_dim, num_heads, dropout, readers)
        self.v_proj = Linear(embed_dim, embed_dim, self.has_bias)
        self.out_proj = Linear(embed_dim, embed_dim, self.has_bias)

    @classmethod
    def count_parameters(cls, sizes: Sizes, settings: Settings) -> int:
        """2 C^2, and 2 C of biases."""
        c = sizes.embed_dim
        return 2 * c * c + (2 * c if cls.has_bias else 0)

    @classmethod
    def count_flops(cls, sizes: Sizes, settings: Settings, time: int, keys: int, batch: int) -> Flops:
        c = sizes.embed_dim
        return Flops(2 * batch * (keys + time) * c * c, 2 * batch * time * keys * c)

    def forward(
        self, x_BTC: Tensor, below: HandedOn, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, HandedOn]:
        """Attends with the given distribution, which includes biases and masks already."""
        v = split_heads(self.v_proj(with_memory(memory_BMC, x_BTC)), self.num_heads)
        dropout = self.dropout if self.training else 0.0
        return self.out_proj(merge_heads(below[DISTRIBUTION].attend(v, dropout))), {}


class CausalLazyAttention(LazyAttention):
    """Like Transformer-XL's attention, its projections have no biases."""

    has_bias = False
