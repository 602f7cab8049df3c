"""The ``f`` sublayer: two linear maps and an activation."""

from collections.abc import Callable
from typing import Optional

from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.memory_costs import Memory, Pass
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState, Sublayer, SublayerOptions
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.sizes import Sizes


class FeedForward(Sublayer):
    """W2 dropout(activation(W1 x)), with W = `ffn_embed_dim` hidden numbers."""

    def __init__(
        self, embed_dim: int, ffn_embed_dim: int, activation: Callable[[Tensor], Tensor] = F.gelu, dropout: float = 0.0
    ):
        super().__init__()
        self.activation = activation
        self.dropout = dropout
        self.fc1 = Linear(embed_dim, ffn_embed_dim)
        self.fc2 = Linear(ffn_embed_dim, embed_dim)

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "FeedForward":
        return cls(options.embed_dim, options.ffn_embed_dim, options.activation, options.activation_dropout)

    @classmethod
    def count_memory(cls, sizes: Sizes, planned: PlannedSublayer, run: Pass) -> Memory:
        """What the activation and the second map remember: two of (B, T, W), of which ReLU shares one, and a mask."""
        hidden, output = run.tokens(sizes.ffn_embed_dim), run.tokens(sizes.embed_dim)
        remembered = 2 if run.activation_dropout or run.activation != "relu" else 1
        mask = run.mask_of_tokens(sizes.ffn_embed_dim) if run.activation_dropout else 0
        gradients = hidden * (3 - remembered)  # one of the remembered is gone by then
        return Memory(remembered * hidden + mask, output + (hidden if mask else 0), max(output, gradients))

    def forward(
        self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, SharedState]:
        hidden = F.dropout(self.activation(self.fc1(x_BTC)), self.dropout, self.training)
        return self.fc2(hidden), {}
