"""The ``s`` sublayer of an encoder: multi-head self-attention that can hand its distribution on."""

from typing import Optional

from torch import Tensor

from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.attention_heads import AttentionSublayer, split_heads
from lazyformer_fairseq.modules.sublayers.interface import Context, Flops, HandedOn, Settings
from lazyformer_fairseq.patterns.sizes import Sizes


class SelfAttention(AttentionSublayer):
    """softmax(QK^T / sqrt(D) + bias) V with an output projection."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, readers: int = 0):
        super().__init__(embed_dim, num_heads, dropout, readers)
        self.qkv_proj = Linear(embed_dim, 3 * embed_dim)
        self.out_proj = Linear(embed_dim, embed_dim)

    @classmethod
    def count_parameters(cls, sizes: Sizes, settings: Settings) -> int:
        """4 C^2 + 4 C."""
        return 4 * (sizes.embed_dim**2 + sizes.embed_dim)

    @classmethod
    def count_flops(cls, sizes: Sizes, settings: Settings, time: int, keys: int, batch: int) -> Flops:
        c = sizes.embed_dim
        return Flops(2 * batch * time * 4 * c * c, 2 * (2 * batch * time * keys * c))

    def forward(
        self, x_BTC: Tensor, below: HandedOn, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, HandedOn]:
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv_proj(x_BTC).chunk(3, dim=-1))
        return self.attend(q, k, v, shared.scores, shared)
