"""What every sublayer shares: the residual connection, LayerNorm and dropout around its inner module."""

from typing import Optional

from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.layer_norm import EPS, layer_norm
from lazyformer_fairseq.modules.memory_costs import SINGLE, Memory, Pass
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState, Sublayer
from lazyformer_fairseq.patterns.sizes import Sizes


class ResidualSublayer(nn.Module):
    """LayerNorm(x + F(x)) (post-norm, BERT), or x + F(LayerNorm(x)) (pre-norm; PAR Transformer, equations 1 and 2).

    F is `inner`, of any kind; dropout acts on its output.
    """

    def __init__(
        self,
        inner: Sublayer,
        embed_dim: int,
        dropout: float = 0.0,
        normalize_before: bool = False,
        layer_norm_eps: float = EPS,
    ):
        super().__init__()
        self.inner = inner
        self.attends = inner.attends
        self.dropout = dropout
        self.normalize_before = normalize_before
        self.layer_norm = layer_norm(embed_dim, layer_norm_eps)

    @staticmethod
    def count_memory(inner: Memory, sizes: Sizes, run: Pass) -> Memory:
        """Of `inner` and what stands around it: a dropout mask, the input and the output of LayerNorm, two sums a row.

        In the backward pass gradients of the output, and of what goes past, take the place of LayerNorm's two.
        """
        x = run.tokens(sizes.embed_dim)
        mask = run.mask_of_tokens(sizes.embed_dim) if run.dropout else 0
        kept = inner.kept + 2 * x + mask + 2 * SINGLE * run.batch * run.time
        return inner._replace(kept=kept, forward=max(inner.forward, x), backward=max(inner.backward - mask, 2 * x))

    def forward(
        self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, SharedState]:
        """As :meth:`~lazyformer_fairseq.modules.sublayers.interface.Sublayer.forward`.

        `memory_BMC` comes from before any LayerNorm; sublayers that do not attend ignore it.
        """
        inner_input = self._normalised(x_BTC)
        if self.attends and memory_BMC is not None:
            y, handed_on = self.inner(inner_input, below, shared, self._normalised(memory_BMC))
        else:
            y, handed_on = self.inner(inner_input, below, shared)
        x_BTC = x_BTC + F.dropout(y, self.dropout, self.training)
        return (x_BTC if self.normalize_before else self.layer_norm(x_BTC)), handed_on

    def _normalised(self, x: Tensor) -> Tensor:
        return self.layer_norm(x) if self.normalize_before else x
