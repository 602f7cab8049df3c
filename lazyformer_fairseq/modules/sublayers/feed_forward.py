"""The ``f`` sublayer: two linear maps and an activation."""

from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention import ReusableAttention
from lazyformer_fairseq.modules.linear import Linear


class FeedForward(nn.Module):
    """W2 activation(W1 x); 2 C W + W + C parameters.

    Args:
        embed_dim: C.
        ffn_embed_dim: W.
        activation: elementwise.
        dropout: after the activation.
    """

    attends = False

    def __init__(
        self, embed_dim: int, ffn_embed_dim: int, activation: Callable[[Tensor], Tensor] = F.gelu, dropout: float = 0.0
    ):
        super().__init__()
        self.activation = activation
        self.dropout = dropout
        self.fc1 = Linear(embed_dim, ffn_embed_dim)
        self.fc2 = Linear(ffn_embed_dim, embed_dim)

    def forward(
        self, x_BTC: Tensor, distribution: Optional[ReusableAttention], shared: Any
    ) -> tuple[Tensor, Optional[ReusableAttention]]:
        """Returns the output (B, T, C) and `distribution` unchanged, for a lazy sublayer further up."""
        hidden = F.dropout(self.activation(self.fc1(x_BTC)), self.dropout, self.training)
        return self.fc2(hidden), distribution
