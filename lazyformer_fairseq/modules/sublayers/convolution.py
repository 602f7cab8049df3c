"""The ``c`` sublayer: a gated convolution over neighbouring tokens (Wu et al., 2019, section 3)."""

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.depthwise import convolve
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.memory_costs import Memory, Pass
from lazyformer_fairseq.modules.sublayers.attention_heads import check_heads
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState, Sublayer, SublayerOptions
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import LIGHTWEIGHT
from lazyformer_fairseq.patterns.sizes import Sizes


class Convolution(Sublayer):
    """W2 conv(GLU(W1 x)): a projection to 2 C, of which one half gates the other, a filter a channel, a projection.

    An encoder's filter is centred; one of even width has its extra place before the token. A causal model's ends at the
    token, and reaches back into the memory. Padding, and what is before or after the text, counts as zero.

    Args:
        embed_dim: C.
        width: W, places of a filter.
        num_heads: N. Above 0 the filters are those of lightweight convolution: softmax makes each a distribution over
            its places, and the C / N channels of a head share one. 0 for a filter of its own for each channel.

    Raises:
        ValueError: heads do not divide the width of the network.
    """

    attends = True
    has_scores = False

    def __init__(self, embed_dim: int, width: int, num_heads: int = 0):
        super().__init__()
        self.num_heads = num_heads
        self.width = width
        self.channels = embed_dim
        self.in_proj = Linear(embed_dim, 2 * embed_dim)
        self.out_proj = Linear(embed_dim, embed_dim)
        if num_heads:
            check_heads(embed_dim, num_heads)
        self.weight = nn.Parameter(torch.empty(num_heads or embed_dim, width))
        if num_heads:
            nn.init.xavier_uniform_(self.weight.data[:, None])  # as fairseq's
        else:
            nn.init.normal_(self.weight, std=width**-0.5)  # keeps the variance of independent tokens

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "Convolution":
        heads = options.num_heads if planned.values["form"] == LIGHTWEIGHT else 0
        return cls(options.embed_dim, planned.values["width"], heads)

    @classmethod
    def count_memory(cls, sizes: Sizes, planned: PlannedSublayer, run: Pass) -> Memory:
        """Both halves of the projection, the gated half and the convolved one."""
        x = run.tokens(sizes.embed_dim)
        return Memory(4 * x, x, 2 * x)

    def forward(
        self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, SharedState]:
        gated = self._gated(x_BTC)
        if (is_padding := shared.scores.is_padding(x_BTC.size(1))) is not None:
            gated = gated * (~is_padding).to(gated)[..., None]  # on a processor an eighth of masked_fill's time
        # A causal model looks back alone.
        before, after = (self.width - 1, 0) if shared.scores.is_causal else (self.width // 2, (self.width - 1) // 2)
        if memory_BMC is not None and before:
            # By itself: on a processor products of a multiple of 128 tokens are faster, see modules/linear.py.
            remembered = self._gated(memory_BMC[:, -before:])
            gated, before = torch.cat([remembered, gated], 1), before - remembered.size(1)
        return self.out_proj(convolve(gated, self.filters(), before, after)), {}

    def _gated(self, x_BTC: Tensor) -> Tensor:
        return F.glu(self.in_proj(x_BTC), -1)

    def filters(self) -> Tensor:
        """One for each channel, (C, W)."""
        if not self.num_heads:
            return self.weight
        return self.weight.softmax(-1).repeat_interleave(self.channels // self.num_heads, 0)
