"""What every sublayer shares: the residual connection, LayerNorm and dropout around its inner module."""

from typing import Any, Optional

from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention import ReusableAttention
from lazyformer_fairseq.modules.layer_norm import layer_norm


class ResidualSublayer(nn.Module):
    """LayerNorm(x + F(x)) (post-norm, BERT), or x + F(LayerNorm(x)) (pre-norm; PAR Transformer, equations 1 and 2).

    Args:
        inner: F: SelfAttention, RelativeAttention, LazyAttention or FeedForward.
        embed_dim: C.
        dropout: on F's output.
        normalize_before: pre-norm.

    Attributes:
        attends: whether F looks at other positions (``s`` and ``l``), and so at memory.
    """

    def __init__(self, inner: nn.Module, embed_dim: int, dropout: float = 0.0, normalize_before: bool = False):
        super().__init__()
        self.inner = inner
        self.attends: bool = inner.attends
        self.dropout = dropout
        self.normalize_before = normalize_before
        self.layer_norm = layer_norm(embed_dim)

    def forward(
        self, x_BTC: Tensor, distribution: Optional[ReusableAttention], shared: Any, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, Optional[ReusableAttention]]:
        """(x, distribution) -> (x, distribution), as the loops of Encoder and CausalDecoder carry them.

        Args:
            x_BTC: input.
            distribution: of the nearest ``s`` below, from before dropout; None below the first.
            shared: what all sublayers of one forward pass share: in the Encoder an :class:`AttentionContext`, in the
                CausalDecoder a :class:`RelativePositions`.
            memory_BMC: what `x_BTC` was in the previous segments, before any LayerNorm; without effect on an ``f``.
        """
        inner_input = self._normalised(x_BTC)
        if self.attends and memory_BMC is not None:
            y, distribution = self.inner(inner_input, distribution, shared, self._normalised(memory_BMC))
        else:
            y, distribution = self.inner(inner_input, distribution, shared)
        x_BTC = x_BTC + F.dropout(y, self.dropout, self.training)
        return (x_BTC if self.normalize_before else self.layer_norm(x_BTC)), distribution

    def _normalised(self, x: Tensor) -> Tensor:
        return self.layer_norm(x) if self.normalize_before else x
