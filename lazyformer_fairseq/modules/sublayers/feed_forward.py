"""Sublayers of one token at a time, ``f`` and ``-``, and the residual connection around every sublayer."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.layer_norm import EPS, layer_norm
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.memory_costs import SINGLE, Memory, Pass
from lazyformer_fairseq.modules.sublayers.interface import (
    Context,
    Output,
    SharedState,
    Sublayer,
    SublayerOptions,
    by_document,
)
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import Sizes


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU's approximation by a hyperbolic tangent (Hendrycks and Gimpel, 2016, section 2)."""
    return F.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """max(0, x)^2 (So et al., 2021, Primer, section 4)."""
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "relu_squared": relu_squared,
}


class FeedForward(Sublayer):
    """``f``: W2 dropout(activation(W1 x)), with W = `ffn_embed_dim` hidden numbers."""

    takes_documents = True

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

    def forward(self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Tensor | None = None) -> Output:
        hidden = F.dropout(self.activation(self.fc1(x_BTC)), self.dropout, self.training)
        return self.fc2(hidden), {}


class Identity(Sublayer):
    """``-``: x, without a residual connection or LayerNorm: a search chose no sublayer here (PAR Transformer, 2.1)."""

    is_residual = False

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "Identity":
        return cls()

    @classmethod
    def count_memory(cls, sizes: Sizes, planned: PlannedSublayer, run: Pass) -> Memory:
        return Memory(0)

    def forward(self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Tensor | None = None) -> Output:
        return x_BTC, {}


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

    def forward(self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Tensor | None = None) -> Output:
        """As :meth:`~lazyformer_fairseq.modules.sublayers.interface.Sublayer.forward`.

        `memory_BMC` comes from before any LayerNorm; sublayers that do not attend ignore it.
        """
        has_memory = self.attends and memory_BMC is not None
        memory = (self._normalised(memory_BMC),) if has_memory else ()
        if has_memory or self.inner.takes_documents:
            y, handed_on = self.inner(self._normalised(x_BTC), below, shared, *memory)
        else:
            y, handed_on = by_document(self.inner, [self._normalised(x_BTC)], below, shared)
        x_BTC = x_BTC + F.dropout(y, self.dropout, self.training)
        return (x_BTC if self.normalize_before else self.layer_norm(x_BTC)), handed_on

    def _normalised(self, x: Tensor) -> Tensor:
        return self.layer_norm(x) if self.normalize_before else x
