"""The ``-`` of a pattern: a search chose no sublayer here (PAR Transformer, section 2.1)."""

from typing import Optional

from torch import Tensor

from lazyformer_fairseq.modules.memory_costs import Memory, Pass
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState, Sublayer, SublayerOptions
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.sizes import Sizes


class Identity(Sublayer):
    """x, without a residual connection or LayerNorm around it."""

    is_residual = False

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "Identity":
        return cls()

    @classmethod
    def count_memory(cls, sizes: Sizes, planned: PlannedSublayer, run: Pass) -> Memory:
        return Memory(0)

    def forward(
        self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, SharedState]:
        return x_BTC, {}
