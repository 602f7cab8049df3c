"""The stack shared by the encoder and the causal decoder, which builds the sublayers of a pattern and runs them."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Optional, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.selection import BackEndSelector, check_back_end
from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.modules.layer_norm import EPS, NormOptions
from lazyformer_fairseq.modules.networks.recomputed import (
    check_reversible,
    run_checkpointed,
    run_reversible,
    runs_of,
    segments_of,
    units_of,
)
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention_variants.span import SPANS, measure_spans
from lazyformer_fairseq.modules.sublayers.feed_forward import EXPERTS, ResidualSublayer
from lazyformer_fairseq.modules.sublayers.interface import (
    Context,
    SharedState,
    StackOutput,
    SublayerOptions,
    build_sublayer,
)
from lazyformer_fairseq.patterns.attention_variants import chosen_variants
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan
from lazyformer_fairseq.patterns.kinds import CAUSAL, LAYER, Sizes


class Stack(nn.Module):
    """A stack of the sublayers in a pattern, and the base class of Encoder and CausalDecoder.

    Args:
        pattern: the sublayers, as a string; see :mod:`lazyformer_fairseq.patterns.grammar`.
        embed_dim: C, the embedding dimension.
        ffn_embed_dim: the hidden size of the feed-forward sublayers.
        num_heads: N, the number of attention heads, which must divide C.
        dropout: the dropout rate on the output of every sublayer.
        attention_dropout: the dropout rate on attention distributions.
        activation_dropout: the dropout rate after the activation in feed-forward sublayers.
        activation: the activation function of the feed-forward sublayers.
        normalize_before: whether to use pre-norm instead of post-norm.
        attention_backend: the attention back end: "auto" or one of :data:`attention.selection.BACKENDS`.
        max_positions: the maximum input length of an encoder in tokens; 0 for no limit.
        layer_norm_eps: the epsilon that each norm adds to the variance.
        norm: the type of all norms, LAYER or RMS.
        norm_bias: whether LayerNorms have a bias.
        linear_bias: whether the sublayers' linear layers have biases.
        reversible: whether the sublayers, which must be pre-norm, alternately update two streams. The backward pass
            recomputes activations from the final streams; see
            :func:`~lazyformer_fairseq.modules.networks.recomputed.run_reversible`.
        experts_loss: the weight of the experts' load-balancing loss.

    Attributes:
        direction: ENCODER or CAUSAL, which determines the module class of each sublayer kind.
        attention_backend: the attention back end. It may be changed between forward passes, because the weights do not
            depend on it. The same applies to `compiles` and `checkpoints`.
        compiles: whether training runs the sublayers through torch.compile.
        checkpoints: whether training keeps only the inputs of layers and recomputes everything else in the backward
            pass (Sparse Transformer, section 5.4). It has no effect on reversible networks.
        features: names of the terms that the network adds to all scores, such as "bias". Some attention variants do not
            support them.

    Raises:
        UserError: If an option is out of bounds or options conflict.
    """

    direction: ClassVar[str]
    sublayers: Sequence[nn.Module]
    features: frozenset[str] = frozenset()
    _compiles = False
    checkpoints = False

    def __init__(  # noqa: PLR0913, PLR0917 - sizes
        self,
        pattern: str,
        embed_dim: int,
        ffn_embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        normalize_before: bool = False,
        attention_backend: str = "auto",
        max_positions: int = 0,
        layer_norm_eps: float = EPS,
        norm: str = LAYER,
        norm_bias: bool = True,
        linear_bias: bool = True,
        reversible: bool = False,
        experts_loss: float = 0.01,
    ):
        super().__init__()
        if not 0 < layer_norm_eps < 1:
            raise UserError(
                f"the epsilon of LayerNorm must be above 0 and below 1, such as {EPS}, not {layer_norm_eps}"
            )
        if not 0 <= experts_loss < math.inf:
            raise UserError(f"--experts-loss {experts_loss:g}: must be 0 or more")
        self.options = SublayerOptions(
            embed_dim=embed_dim,
            ffn_embed_dim=ffn_embed_dim,
            num_heads=num_heads,
            attention_dropout=attention_dropout,
            activation_dropout=activation_dropout,
            activation=activation,
            max_positions=max_positions,
            is_causal=self.direction == CAUSAL,
            linear_bias=linear_bias,
        )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.normalize_before = normalize_before
        self.experts_loss = experts_loss
        self.norm = NormOptions(layer_norm_eps, norm, norm_bias)
        self.plan = plan(pattern, self.direction)
        self.attention_backend = attention_backend
        self.reversible = reversible
        if reversible:
            check_reversible(self.plan, self.direction, normalize_before)

    def build_sublayers(self) -> Sequence[nn.Module]:
        """Build all sublayers of the plan with newly initialized weights, as an nn.ModuleList."""
        built = nn.ModuleList(self.build_sublayer(planned) for planned in self.plan)
        return cast(Sequence[nn.Module], built)

    def build_sublayer(self, planned: PlannedSublayer) -> nn.Module:
        """Build a sublayer of this network with newly initialized weights and its residual connection.

        Raises:
            UserError: If the sublayer's settings do not support a term that this network adds to all scores.
        """
        check_score_features(planned, self.features)
        inner = build_sublayer(planned.kind.module(self.direction), self.options, planned)
        if not inner.is_residual:
            return inner
        return ResidualSublayer(inner, self.embed_dim, self.dropout, self.normalize_before, self.norm)

    @property
    def compiles(self) -> bool:
        """True if training runs the sublayers through torch.compile."""
        return self._compiles

    @compiles.setter
    def compiles(self, is_on: bool) -> None:
        if is_on and self.options.common.get(EXPERTS):
            raise UserError(
                "--compile: models with experts cannot be compiled, because the number of tokens per expert depends on "
                "the data; omit this option"
            )
        self._compiles = is_on

    @property
    def has_scores(self) -> bool:
        """True if any sublayer adds a bias or position terms to its scores."""
        inner = (getattr(sublayer, "inner", sublayer) for sublayer in self.sublayers)
        return any(each.attends and getattr(each, "has_scores", True) for each in inner)

    @property
    def sizes(self) -> Sizes:
        """The network's sizes, which :mod:`lazyformer_fairseq.evaluation.costs` uses to count costs."""
        raise NotImplementedError

    @property
    def attention_backend(self) -> str:
        """The name of the attention back end."""
        return self._attention_backend

    @attention_backend.setter
    def attention_backend(self, name: str) -> None:
        check_back_end(name, self.options.attention_dropout)
        self._attention_backend = name

    def back_end(self) -> BackEndSelector:
        """Measure learned spans, and return the back-end selector for one forward pass."""
        measure_spans(self.options.common.get(SPANS, ()))  # done here, because compiled code must not synchronize
        return BackEndSelector(self.attention_backend, sum(planned.kind.computes_scores for planned in self.plan))

    def context(self, x_BTC: Tensor, memory_length: int = 0) -> Context:
        """Build the context that the sublayers share in a forward pass over `x_BTC`."""
        raise NotImplementedError

    def run(
        self,
        x_BTC: Tensor,
        shared: Context,
        return_all: bool = False,
        memory: Optional[StreamMemory] = None,
        selected_M: Optional[Tensor] = None,
    ) -> StackOutput:
        """Run all sublayers.

        Args:
            x_BTC: the input of the first sublayer.
            shared: the context of the forward pass.
            return_all: whether to also return the input and the outputs of all sublayers.
            memory: the attending sublayers' inputs from previous segments.
            selected_M: the tokens to return outputs for, as indices into the flattened batch; None for all tokens. The
                output then has the shape (1, M, C). The tokenwise sublayers at the top are computed only for these
                tokens, unless all outputs are returned or the network is reversible.
        """
        past = None
        if memory is not None:
            past = memory.by_sublayer([bool(sublayer.attends) for sublayer in self.sublayers])
        end = len(self.sublayers)
        tail = end
        if selected_M is not None and not return_all and not self.reversible:
            tail = tail_start(self.sublayers)
        output = self._run_part(slice(tail), past, x_BTC, shared, return_all)
        if selected_M is None:
            return output
        wanted_1MC = output.x_BTC.flatten(0, 1).index_select(0, selected_M)[None]
        if tail == end:
            return output._replace(x_BTC=wanted_1MC)
        return self._run_part(
            slice(tail, end),
            past=None,
            x_BTC=wanted_1MC,
            shared=shared._replace(documents=None),
            return_all=False,
        )

    def _run_part(
        self,
        part: slice,
        past: Optional[Sequence[Optional[Tensor]]],
        x_BTC: Tensor,
        shared: Context,
        return_all: bool,
    ) -> StackOutput:
        """Run a slice of the sublayers with checkpointing, reversible layers or compilation, as configured.

        The other arguments are described in :func:`run_sublayers`.
        """
        sublayers = list(self.sublayers)[part]
        planned = self.plan[part]
        is_compiled = self.compiles and self.training
        run = run_sublayers
        if is_compiled:
            run = compiled(run_sublayers)
        has_own_sublayers = len(self.sublayers) == len(self.plan)  # False in a search, which replaces the sublayers

        if self.reversible and has_own_sublayers:
            units = units_of(runs_of(planned), sublayers, past)
            return run_reversible(units, x_BTC, shared, is_compiled, return_all)
        if self.checkpoints and has_own_sublayers and self.training and torch.is_grad_enabled():
            units = units_of(segments_of(planned, self.direction), sublayers, past)
            return run_checkpointed(
                units,
                x_BTC,
                shared,
                run=run,
                return_all=return_all,
                checkpoint=self.checkpoint,
                keeps_cache=not self.compiles,
            )
        return run(sublayers, past, x_BTC, shared, return_all)

    def checkpoint(self, function: Callable, *arguments: Any) -> Any:
        """Call `function` under gradient checkpointing and return its result."""
        return checkpoint(function, *arguments, use_reentrant=False)


def check_score_features(planned: PlannedSublayer, features: Iterable[str], prefix: str = "") -> None:
    """Raise a UserError if one of a sublayer's attention variants does not support one of these score features.

    Args:
        planned: the sublayer.
        features: the terms that the network adds to all scores, "bias" or "mask".
        prefix: the beginning of the message.
    """
    for row in chosen_variants(planned.values):
        for feature in row.refuses.keys() & features:
            raise UserError(f"{prefix}{planned.text}: {row.refuses[feature]}")


def tail_start(sublayers: Sequence[nn.Module]) -> int:
    """Return the index at which the tokenwise sublayers at the top of the stack begin."""
    start = len(sublayers)
    while start and getattr(sublayers[start - 1], "is_tokenwise", False):
        start -= 1
    return start


def run_sublayers(
    sublayers: Sequence[nn.Module],
    past: Optional[Sequence[Optional[Tensor]]],
    x_BTC: Tensor,
    shared: Context,
    return_all: bool,
) -> StackOutput:
    """Run sublayers in order.

    Args:
        sublayers: the sublayers, from bottom to top.
        past: one memory (B, M, C) per sublayer, where None stands for a sublayer without memory. If no memory is used
            at all, `past` itself is None.
        x_BTC: the input of the first sublayer.
        shared: the context of the forward pass.
        return_all: whether to also return the input and the outputs of all sublayers.
    """
    states = []
    if return_all:
        states.append(x_BTC)
    attended: list[Tensor] = []
    below: SharedState = {}
    for place, sublayer in enumerate(sublayers):
        remembered = None
        if past is not None and sublayer.attends:
            remembered = past[place]
            attended.append(x_BTC)
        if remembered is not None:
            remembered = remembered.to(x_BTC)
        x_BTC, handed_on = sublayer(x_BTC, below, shared, remembered)
        below = {**below, **handed_on}
        if return_all:
            states.append(x_BTC)
    return StackOutput(x_BTC, states, attended)
