"""The stack that encoder and causal decoder share. It builds the sublayers of a pattern and runs through them."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Optional, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.selection import BackEndSelector, check_back_end
from lazyformer_fairseq.modules.compiled import compiled
from lazyformer_fairseq.modules.layer_norm import EPS, NormOptions
from lazyformer_fairseq.modules.networks.recomputed import (
    add_up,
    keeping,
    run_reversible,
    runs_of,
    segments_of,
    unwritten,
)
from lazyformer_fairseq.modules.sublayers.attention_kinds.span import SPANS, measure_spans
from lazyformer_fairseq.modules.sublayers.attention_variant import variant_classes
from lazyformer_fairseq.modules.sublayers.feed_forward import EXPERTS, ResidualSublayer, Told
from lazyformer_fairseq.modules.sublayers.interface import (
    Context,
    SharedState,
    SublayerOptions,
    build_sublayer,
)
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan
from lazyformer_fairseq.patterns.kinds import CAUSAL, LAYER, Sizes


class StreamMemory:
    """What a stream of text remembers from one segment to the next (Transformer-XL, section 3.2).

    The inputs that attending sublayers (``s`` and ``l``) had in the segments before, one row of a batch per stream.

    Whoever walks through the streams keeps it and passes it to the model with every segment; the model reads it and
    puts the new segment's inputs in. Modules keep no state.

    Attributes:
        states: a detached (B, M, C) for each attending sublayer, the lowest first; empty at the start of streams.
    """

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    @property
    def length(self) -> int:
        """M, the number of tokens remembered."""
        if self.states:
            return self.states[0].size(1)
        return 0

    @property
    def seen(self) -> int:
        """Tokens that were read before, where that is known to differ from those remembered."""
        return self.length

    def clear(self) -> None:
        """Forgets everything: new streams start."""
        self.states = []

    def before(self, sublayer: int, x_BTC: Tensor) -> Optional[Tensor]:
        """The (B, M, C) of the attending sublayer of this number, on the device and in the precision of its input.

        None at the start of streams.
        """
        if self.states:
            return self.states[sublayer].to(x_BTC)
        return None

    def part(self, first: int, count: int) -> "StreamMemory":
        """That of some attending sublayers, as it is now."""
        part = StreamMemory()
        part.states = self.states[first : first + count]
        return part

    def remember(self, inputs: list[Tensor], mem_len: int) -> None:
        """Adds a segment; keeps the last `mem_len` tokens of memory and segment.

        Args:
            inputs: (B, T, C) for each attending sublayer, the lowest first.
            mem_len: tokens to keep; 0 for no memory.
        """
        if mem_len == 0:
            return self.clear()
        self.states = [_last(self.before(number, x), x.detach(), mem_len) for number, x in enumerate(inputs)]

    def state_dict(self) -> dict[str, list[Tensor]]:
        """For a checkpoint: plain tensors."""
        return {"states": list(self.states)}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Restores what :meth:`state_dict` returned. Tensors may be on any device; the model moves them."""
        self.states = list(state["states"])


class WholeMemory(StreamMemory):
    """What a text remembers while it is continued.

    Args:
        longest: most tokens to remember, as `mem_len` in training; None for all.

    Attributes:
        seen: tokens read so far, which whoever passes them counts.
    """

    seen = 0

    def __init__(self, longest: Optional[int] = None):
        super().__init__()
        self.longest = longest

    def remember(self, inputs: list[Tensor], mem_len: int) -> None:
        """Adds a segment; `mem_len`, the decoder's, does not count."""
        whole = self.length + sum(x.size(1) for x in inputs[:1])
        super().remember(inputs, whole if self.longest is None else self.longest)


def _last(memory_BMC: Optional[Tensor], x_BTC: Tensor, mem_len: int) -> Tensor:
    """The last `mem_len` positions of both, in storage of their own: a view would keep all of it alive."""
    kept = max(mem_len - x_BTC.size(1), 0)
    parts = [x_BTC[:, -mem_len:]]
    if memory_BMC is not None and kept:
        parts.insert(0, memory_BMC[:, -kept:])
    return torch.cat(parts, dim=1)


class Stack(nn.Module):
    """Sublayers of a pattern, one above the other. Encoder and CausalDecoder put embeddings around it.

    Args:
        pattern: see :mod:`lazyformer_fairseq.patterns.grammar`.
        embed_dim: C.
        ffn_embed_dim: width of the feed-forward sublayers.
        num_heads: N; must divide C.
        dropout: on every sublayer's output.
        attention_dropout: on attention distributions.
        activation_dropout: after the activation of the feed-forward sublayers.
        activation: of the feed-forward sublayers.
        normalize_before: pre-norm.
        attention_backend: how attention is computed, "auto" or one of :data:`attention.selection.BACKENDS`.
        max_positions: of an encoder's input; 0 for no limit.
        layer_norm_eps: what each norm adds to the variance.
        norm: of all norms, LAYER or RMS.
        norm_bias: whether LayerNorms have a bias.
        linear_bias: whether linear maps of sublayers have biases.
        reversible: whether sublayers, pre-norm, update two streams in turn, which the backward pass computes anew from
            the last ones; see :func:`~lazyformer_fairseq.modules.networks.recomputed.run_reversible`.
        experts_loss: weight of the loss that keeps experts busy.

    Attributes:
        direction: ENCODER or CAUSAL: which module a kind has here.
        attention_backend: may be set between two forward passes; weights do not depend on it.
        compiles: whether torch.compile takes the sublayers in training; may be set in the same way.
        checkpoints: whether training keeps the inputs of layers alone, and computes the rest anew in the backward pass
            (Sparse Transformer, section 5.4); may be set in the same way. With `reversible` there is nothing to do.
        features: of its scores besides padding, see :attr:`Scores.features`.

    Raises:
        ValueError: sizes that do not fit together.
    """

    direction: ClassVar[str]
    features: frozenset[str] = frozenset()

    def __init__(
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
            raise UserError(f"a LayerNorm's epsilon of {layer_norm_eps}: must be above 0 and below 1, such as {EPS}")
        widths = (embed_dim, ffn_embed_dim, num_heads)
        dropouts = (attention_dropout, activation_dropout)
        self.options = SublayerOptions(
            *widths,
            *dropouts,
            activation,
            max_positions,
            is_causal=self.direction == CAUSAL,
            linear_bias=linear_bias,
        )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.normalize_before = normalize_before
        if not 0 <= experts_loss < math.inf:
            raise UserError(f"--experts-loss {experts_loss:g}: must be 0 or more")
        self.experts_loss = experts_loss
        self.norm = NormOptions(layer_norm_eps, norm, norm_bias)
        self.plan = plan(pattern, self.direction)
        self.attention_backend = attention_backend
        self.compiles = self.checkpoints = False
        self.reversible = reversible
        if reversible:
            self._refuse_irreversible()

    def _refuse_irreversible(self) -> None:
        if not self.normalize_before:
            if self.direction == CAUSAL:
                part = "decoder"
            else:
                part = "encoder"
            raise UserError(f"--reversible: a post-norm cannot be undone; give --{part}-normalize-before too")
        for planned in self.plan:
            if not planned.kind.module(self.direction).is_residual:
                raise UserError(f"--reversible: {planned.text} has no residual connection; leave it out of the pattern")
            if planned.values.get("experts"):
                raise UserError(
                    f"--reversible: {planned.text} would not learn to use its experts equally; leave one out"
                )

    def build_sublayers(self) -> nn.ModuleList:
        """One module per place of the plan, with fresh weights."""
        return nn.ModuleList(self.build_sublayer(planned) for planned in self.plan)

    def build_sublayer(self, planned: PlannedSublayer) -> nn.Module:
        """One sublayer of this network's sizes, with weights of its own.

        Raises:
            UserError: its settings cannot stand with what this network puts into all scores.
        """
        self.refuse(planned, self.features)
        inner = build_sublayer(planned.kind.module(self.direction), self.options, planned)
        if not inner.is_residual:
            return inner
        return ResidualSublayer(inner, self.embed_dim, self.dropout, self.normalize_before, self.norm)

    @staticmethod
    def refuse(planned: PlannedSublayer, features: Iterable[str], what: str = "") -> None:
        """Raises a UserError where a sublayer's settings cannot stand with some of these features of scores."""
        for choice in variant_classes(planned.values):
            for feature in choice.refuses.keys() & features:
                raise UserError(f"{what}{planned.text}: {choice.refuses[feature]}")

    def take_told(self) -> Optional[Told]:
        """What its sublayers of experts tell of the last pass in training, once: weighted losses and counts, summed."""
        told = [told for each in self.options.common.get(EXPERTS, ()) if (told := each.take_told()) is not None]
        if not told:
            return None
        loss, dropped, wanted = (torch.stack(each).sum() for each in zip(*told, strict=True))
        return Told(self.experts_loss * loss, dropped, wanted)

    def penalty(self) -> Union[Tensor, float]:
        """What sublayers add to the loss of a token in nats, of the last pass: spans that are learned, and experts."""
        told = self.take_told()
        spans = sum(span.penalty() for span in self.options.common.get(SPANS, ()))
        if told is None:
            return spans
        return spans + told.loss

    @property
    def compiles(self) -> bool:
        return self._compiles

    @compiles.setter
    def compiles(self, is_on: bool) -> None:
        if is_on and self.options.common.get(EXPERTS):
            raise UserError("--compile: how many tokens go to an expert is not known beforehand; leave it out")
        self._compiles = is_on

    @property
    def has_scores(self) -> bool:
        """Whether any sublayer adds a bias or positions to scores."""
        inner = (getattr(sublayer, "inner", sublayer) for sublayer in self.sublayers)
        return any(each.attends and getattr(each, "has_scores", True) for each in inner)

    @property
    def parts(self) -> dict[str, Any]:
        """What `sizes` say of norms and biases."""
        has_bias = {"norm_bias": self.norm.has_bias, "linear_bias": self.options.linear_bias}
        return {"norm": self.norm.kind, **has_bias}

    @property
    def sizes(self) -> Sizes:
        """What the formulas of :mod:`lazyformer_fairseq.evaluation.costs` need."""
        raise NotImplementedError

    def context(self, x_BTC: Tensor, memory_length: int = 0) -> Context:
        """What the sublayers share in a forward pass over `x_BTC`."""
        raise NotImplementedError

    @property
    def attention_backend(self) -> str:
        return self._attention_backend

    @attention_backend.setter
    def attention_backend(self, name: str) -> None:
        self.check_back_end(name)
        self._attention_backend = name

    def check_back_end(self, name: str) -> None:
        """Raise a UserError for a back end that is not there, or has no attention dropout where the network has."""
        check_back_end(name, self.options.attention_dropout)

    def back_end(self) -> BackEndSelector:
        """Return what selects the back ends of a forward pass."""
        measure_spans(self.options.common.get(SPANS, ()))  # before, as what torch.compile sees must not wait for a GPU
        return BackEndSelector(self.attention_backend, sum(planned.kind.computes_scores for planned in self.plan))

    def run(
        self,
        x_BTC: Tensor,
        shared: Context,
        return_all: bool = False,
        memory: Optional[StreamMemory] = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Runs all sublayers.

        Args:
            x_BTC: what goes into the first.
            shared: of this pass.
            return_all: also return the input and all outputs.
            memory: inputs of the attending sublayers in the previous segments.

        Returns:
            The last output (B, T, C); the input and all outputs with `return_all`; the inputs of attending sublayers,
            where there is a memory.
        """
        takes = len(self.sublayers) == len(self.plan)  # else they are others than the pattern's
        compiles = self.compiles and self.training
        if self.reversible and takes:
            return self._run_reversible(compiled(add_up) if compiles else add_up, x_BTC, shared, return_all, memory)
        if compiles:
            run = compiled(_run)
        else:
            run = _run
        if not (self.checkpoints and takes and self.training and torch.is_grad_enabled()):
            return run(self.sublayers, x_BTC, shared, return_all, memory)
        segment = partial(_run_anew, run) if compiles else run  # a compiled graph cannot write once for all segments
        if not compiles:
            shared = keeping(shared)
        segments = self._modules_by(segments_of(self.plan, self.direction), memory)
        all_states = [x_BTC] if return_all else []
        attended = []
        for sublayers, past in segments:
            x_BTC, states, inputs = self.checkpoint(segment, sublayers, x_BTC, shared, return_all, past)
            all_states = [*all_states, *states[1:]]
            attended = [*attended, *inputs]
        return x_BTC, all_states, attended

    def checkpoint(self, function: Callable, *arguments: Any) -> Any:
        """What `function` returns, of which the backward pass computes anew what it needs."""
        return checkpoint(function, *arguments, use_reentrant=False)

    def _run_reversible(
        self,
        branch: Callable,
        x_BTC: Tensor,
        shared: Context,
        return_all: bool,
        memory: Optional[StreamMemory],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """As :meth:`run`; `return_all` keeps all in training, and what goes into each sublayer is its state."""
        units = self._modules_by(runs_of(self.plan), memory)
        x, inputs = run_reversible(units, x_BTC, shared, branch, keeps=return_all)
        attended = [each for each, sublayer in zip(inputs, self.sublayers, strict=True) if sublayer.attends]
        return x, [*inputs, x] if return_all else [], attended if memory is not None else []

    def _modules_by(
        self,
        places: list[list[int]],
        memory: Optional[StreamMemory],
    ) -> list[tuple[list[nn.Module], Optional[StreamMemory]]]:
        """Sublayers in groups, each with its part of the memory as it is before this pass."""
        found = []
        first = 0
        for group in places:
            sublayers = [self.sublayers[place] for place in group]
            count = sum(sublayer.attends for sublayer in sublayers)
            found.append((sublayers, None if memory is None else memory.part(first, count)))
            first += count
        return found


def _run_anew(run: Callable, sublayers: list[nn.Module], x_BTC: Tensor, shared: Context, *more: Any) -> Any:
    return run(sublayers, x_BTC, unwritten(shared), *more)


def _run(
    sublayers: Iterable[nn.Module],
    x_BTC: Tensor,
    shared: Context,
    return_all: bool,
    memory: Optional[StreamMemory],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    if return_all:
        all_states = [x_BTC]
    else:
        all_states = []
    attended: list[Tensor] = []
    below: SharedState = {}
    for sublayer in sublayers:
        remembered: Any = None
        if memory is not None and sublayer.attends:
            remembered = memory.before(len(attended), x_BTC)
            attended.append(x_BTC)
        x_BTC, handed_on = sublayer(x_BTC, below, shared, remembered)
        below = {**below, **handed_on}
        if return_all:
            all_states.append(x_BTC)
    return x_BTC, all_states, attended
