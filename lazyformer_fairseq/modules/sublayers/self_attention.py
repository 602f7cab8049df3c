"""The ``s`` sublayer of an encoder: multi-head self-attention that can hand its distribution on."""

from collections.abc import Mapping
from typing import Optional

from torch import Tensor

from lazyformer_fairseq.modules.attention import attend
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.attention_heads import check_heads, merge_heads, split_heads
from lazyformer_fairseq.modules.sublayers.interface import Context, Flops, HandedOn, Sublayer, SublayerOptions
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, Value
from lazyformer_fairseq.patterns.sizes import Sizes


class SelfAttention(Sublayer):
    """softmax(QK^T / sqrt(D) + bias) V with an output projection.

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

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "SelfAttention":
        readers = planned.readers.count(DISTRIBUTION)
        return cls(options.embed_dim, options.num_heads, options.attention_dropout, readers)

    @classmethod
    def count_parameters(cls, sizes: Sizes, settings: Mapping[str, Value]) -> int:
        """4 C^2 + 4 C."""
        return 4 * (sizes.embed_dim**2 + sizes.embed_dim)

    @classmethod
    def count_flops(cls, sizes: Sizes, settings: Mapping[str, Value], time: int, keys: int, batch: int) -> Flops:
        c = sizes.embed_dim
        return Flops(2 * batch * time * 4 * c * c, 2 * (2 * batch * time * keys * c))

    def forward(
        self, x_BTC: Tensor, below: HandedOn, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, HandedOn]:
        """Hands on its distribution, from before dropout."""
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv_proj(x_BTC).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        back_end = shared.back_end(self.readers)
        attended, distribution = attend(q, k, v, shared.scores, dropout, self.readers, back_end)
        return self.out_proj(merge_heads(attended)), {DISTRIBUTION: distribution}
