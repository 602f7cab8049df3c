"""What every sublayer shares: the residual connection, LayerNorm and dropout around its inner module."""

from typing import Optional

from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.layer_norm import layer_norm


class ResidualSublayer(nn.Module):
    """LayerNorm(x + F(x)) (post-norm, BERT), or x + F(LayerNorm(x)) (pre-norm; PAR Transformer, equations 1 and 2).

    Args:
        inner: F: SelfAttention, LazyAttention or FeedForward.
        embed_dim: C.
        dropout: on F's output.
        normalize_before: pre-norm.
    """

    def __init__(self, inner: nn.Module, embed_dim: int, dropout: float = 0.0, normalize_before: bool = False):
        super().__init__()
        self.inner = inner
        self.dropout = dropout
        self.normalize_before = normalize_before
        self.layer_norm = layer_norm(embed_dim)

    def forward(
        self, x_BTC: Tensor, distribution: Optional[Tensor], bias: Optional[Tensor]
    ) -> tuple[Tensor, Optional[Tensor]]:
        """(x, distribution) -> (x, distribution), as the encoder's loop carries them."""
        inner_input = self.layer_norm(x_BTC) if self.normalize_before else x_BTC
        y, distribution = self.inner(inner_input, distribution, bias)
        x_BTC = x_BTC + F.dropout(y, self.dropout, self.training)
        return (x_BTC if self.normalize_before else self.layer_norm(x_BTC)), distribution
