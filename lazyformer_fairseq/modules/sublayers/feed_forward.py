"""Sublayers of one token at a time, ``f`` and ``-``, and the residual connection around every sublayer."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.layer_norm import NormOptions, layer_norm
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


GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


class FeedForward(Sublayer):
    """``f``: W2 dropout(activation(W1 x)), with W = `ffn_embed_dim` hidden numbers.

    With a gate W2 dropout(gate(W1 x) * V x) (Shazeer, 2020, equation 6); `fc1` has W1 above V, (2 W, C), one product.

    Args:
        gate: a key of GATES, in place of `activation`; "" for none.
    """

    takes_documents = takes_permuted = True

    def __init__(
        self,
        embed_dim: int,
        ffn_embed_dim: int,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        dropout: float = 0.0,
        gate: str = "",
    ):
        super().__init__()
        self.activation = GATES[gate] if gate else activation
        self.is_gated = bool(gate)
        self.dropout = dropout
        self.fc1 = Linear(embed_dim, ffn_embed_dim * (1 + self.is_gated))
        self.fc1.blocks = 1 + self.is_gated
        self.fc2 = Linear(ffn_embed_dim, embed_dim)

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "FeedForward":
        how = options.activation, options.activation_dropout, planned.values.get("gate", "")  # old exports lack it
        return cls(options.embed_dim, options.ffn_embed_dim, *how)

    def last_map(self) -> nn.Module:
        return self.fc2

    @classmethod
    def count_memory(cls, sizes: Sizes, planned: PlannedSublayer, run: Pass) -> Memory:
        """What the activation and the second map remember: two of (B, T, W), of which ReLU shares one, and a mask.

        With a gate four: both halves, what the gate lets through, and the product of the two.
        """
        hidden, output = run.tokens(sizes.ffn_embed_dim), run.tokens(sizes.embed_dim)
        if planned.values["gate"]:
            mask = run.mask_of_tokens(sizes.ffn_embed_dim) if run.activation_dropout else 0
            return Memory(4 * hidden + mask, output + (hidden if mask else 0), max(output, 2 * hidden))
        remembered = 2 if run.activation_dropout or run.activation != "relu" else 1
        mask = run.mask_of_tokens(sizes.ffn_embed_dim) if run.activation_dropout else 0
        gradients = hidden * (3 - remembered)  # one of the remembered is gone by then
        return Memory(remembered * hidden + mask, output + (hidden if mask else 0), max(output, gradients))

    def forward(self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Tensor | None = None) -> Output:
        hidden = self.fc1(x_BTC)
        if self.is_gated:
            gate, values = hidden.chunk(2, -1)
            hidden = self.activation(gate) * values
        else:
            hidden = self.activation(hidden)
        return self.fc2(F.dropout(hidden, self.dropout, self.training)), {}


class Identity(Sublayer):
    """``-``: x, without a residual connection or LayerNorm: a search chose no sublayer here (PAR Transformer, 2.1)."""

    is_residual = False
    takes_permuted = True

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

    F is `inner`, of any kind; dropout acts on its output. What is called LayerNorm may be RMSNorm, see `norm`.
    """

    def __init__(
        self,
        inner: Sublayer,
        embed_dim: int,
        dropout: float = 0.0,
        normalize_before: bool = False,
        norm: NormOptions = NormOptions(),  # noqa: B008 (a named tuple)
    ):
        super().__init__()
        self.inner = inner
        self.attends = inner.attends
        self.dropout = dropout
        self.normalize_before = normalize_before
        self.layer_norm = layer_norm(embed_dim, *norm)

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
        y, handed_on = self.branch(x_BTC, below, shared, memory_BMC)
        x_BTC = x_BTC + y
        return (x_BTC if self.normalize_before else self.layer_norm(x_BTC)), handed_on

    def branch(self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Tensor | None = None) -> Output:
        """F alone, after dropout: what is added to x."""
        has_memory = self.attends and memory_BMC is not None
        memory = (self._normalised(memory_BMC),) if has_memory else ()
        if has_memory or self.inner.takes_documents:
            y, handed_on = self.inner(self._normalised(x_BTC), below, shared, *memory)
        else:
            y, handed_on = by_document(self.inner, [self._normalised(x_BTC)], below, shared)
        return F.dropout(y, self.dropout, self.training), handed_on

    def _normalised(self, x: Tensor) -> Tensor:
        return self.layer_norm(x) if self.normalize_before else x
