"""The module of the sublayer kind from ``docs/add_a_kind.md``."""

from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.attention import with_memory
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState, Sublayer, SublayerOptions
from lazyformer_fairseq.patterns.grammar import PlannedSublayer


class LocalMean(Sublayer):
    """A projection of the mean of `width` neighboring value projections, with 2 C^2 + 2 C parameters in total."""

    attends = True
    has_scores = False

    def __init__(self, embed_dim: int, width: int):
        super().__init__()
        self.width = width
        self.v_proj = Linear(embed_dim, embed_dim)
        self.out_proj = Linear(embed_dim, embed_dim)

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "LocalMean":
        return cls(options.embed_dim, planned.values["width"])

    def forward(
        self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, SharedState]:
        v_BKC = self.v_proj(with_memory(memory_BMC, x_BTC))
        is_text = torch.ones_like(v_BKC[..., :1])
        if (is_padding := shared.scores.is_padding(v_BKC.size(1))) is not None:
            is_text = is_text.masked_fill(is_padding[..., None], 0)
        # A causal model averages over the same number of tokens, but only looks back.
        before, after = (self.width - 1, 0) if shared.scores.is_causal else (self.width // 2, (self.width - 1) // 2)
        sums, counts = (
            F.pad(part.transpose(1, 2), (before, after)).unfold(-1, self.width, 1).sum(-1).transpose(1, 2)
            for part in (v_BKC * is_text, is_text)
        )
        mean_BKC = sums / counts.clamp(min=1)
        return self.out_proj(mean_BKC[:, -x_BTC.size(1) :]), {}
