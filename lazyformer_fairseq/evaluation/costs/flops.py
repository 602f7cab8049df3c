"""Parameter and FLOP counts of a pattern for given sizes, from modules that are built on torch's meta device.

On this device, weights have shapes but no memory, and nothing is computed. The counts are therefore taken from the
modules themselves: their parameters, and the operators that :class:`torch.utils.flop_counter.FlopCounterMode` would see
in the forward pass. Because searches and tables need the counts of thousands of patterns, each sublayer is counted only
once per combination of settings and sizes, and a pattern's count is the sum over its sublayers.

FLOPs are twice the number of multiply-adds in matmuls. Elementwise operations (softmax, LayerNorm, activations,
embeddings, biases) are not counted, as in Table 6 of the PAR paper. For attention, only the keys visible to each query
are counted; see :mod:`lazyformer_fairseq.modules.attention.counted`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lazyformer_fairseq.modules.attention import AttentionCall, AttentionInputs
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.layer_norm import NormOptions
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveEmbedding, AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.heads import MaskedLMHead
from lazyformer_fairseq.modules.sublayers.feed_forward import Experts, ResidualSublayer
from lazyformer_fairseq.modules.sublayers.interface import (
    Context,
    RelativePositions,
    SharedState,
    SublayerOptions,
    build_sublayer,
)
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan
from lazyformer_fairseq.patterns.kinds import CAUSAL, CausalSizes, EncoderSizes, Kind, Sizes, kinds

aten = torch.ops.aten
META = torch.device("meta")
_CACHE_SIZE = 2**14  # number of cached results, one per combination of sublayer, sizes and length


@lru_cache(_CACHE_SIZE)
def _plan(pattern: str, direction: str, _known: tuple[Kind, ...]) -> tuple[PlannedSublayer, ...]:
    return plan(pattern, direction)


def count_parameters(pattern: str, sizes: Sizes) -> int:
    """Return the number of parameters in the entire model, counting tied parameters once.

    Raises:
        UserError: the pattern cannot be parsed.
    """
    total = count_other_parameters(sizes)
    shared: dict[str, int] = {}
    for planned in _plan(pattern, sizes.direction, kinds()):
        counts = _sublayer_parameters(planned, sizes)
        total += counts.own
        shared |= counts.shared
    return total + sum(shared.values())


def count_sublayer_parameters(planned: PlannedSublayer, sizes: Sizes) -> int:
    """Return the number of parameters in a sublayer and its LayerNorm, without parameters shared between sublayers."""
    return _sublayer_parameters(planned, sizes).own


def count_matrix_parameters(pattern: str, sizes: Sizes) -> int:
    """Return the number of parameters in the sublayers' linear layers, which are the parameters that Muon updates."""
    sublayers = _plan(pattern, sizes.direction, kinds())
    return sum(_sublayer_parameters(planned, sizes).matrices for planned in sublayers)


def count_experts_elsewhere(pattern: str, sizes: Sizes, processes: int) -> int:
    """Return the number of expert parameters stored in the run's other processes; see modules/shared_experts.py."""
    found = 0
    for planned in _plan(pattern, sizes.direction, kinds()):
        if planned.values.get("experts", 0) % processes == 0:
            found += _sublayer_parameters(planned, sizes).experts * (processes - 1) // processes
    return found


def count_other_parameters(sizes: Sizes) -> int:
    """Return the number of parameters outside the sublayers: embeddings, head, and biases shared between sublayers."""
    return _outside(sizes).parameters


def count_flops(
    pattern: str,
    sizes: Sizes,
    time: int,
    memory: int = 0,
    batch: int = 1,
    predicted: Optional[int] = None,
) -> int:
    """Return the FLOPs of one forward pass; a backward pass takes twice as many.

    Args:
        pattern: the pattern; see :mod:`lazyformer_fairseq.patterns.grammar`.
        sizes: the sizes of an encoder with its masked-LM head, or of a causal model with its softmax.
        time: T, the number of tokens per sequence.
        memory: M, the number of remembered positions before the sequence, for causal models only. Their keys and values
            are projected again.
        batch: the number of sequences.
        predicted: the number of tokens per sequence that the head predicts; all by default. The feed-forward sublayers
            at the top of an encoder are computed for these tokens only. With 0, the features of all tokens are computed
            without a head. Only the first band of an adaptive softmax is counted, because the words determine which of
            the other bands are computed.

    Raises:
        UserError: the pattern cannot be parsed or built, or does not accept inputs of this length.
    """
    if predicted is None:
        predicted = time
    outside = _outside(sizes)
    sublayers = _plan(pattern, sizes.direction, kinds())
    tail = len(sublayers)
    if isinstance(sizes, EncoderSizes) and not sizes.computes_all_tokens and predicted:
        while tail and _is_tokenwise(sublayers[tail - 1], sizes):
            tail -= 1
    within = sum(count_sublayer_flops(planned, sizes, time, memory, batch) for planned in sublayers[:tail])
    within += sum(count_sublayer_flops(planned, sizes, predicted, 0, batch) for planned in sublayers[tail:])
    return batch * (time * outside.flops_of_input + predicted * outside.flops_of_prediction) + within


@lru_cache(_CACHE_SIZE)
def _is_tokenwise(planned: PlannedSublayer, sizes: Sizes) -> bool:
    with _SkipInit():
        return build_sublayer(planned.kind.module(sizes.direction), _options(sizes), planned).is_tokenwise


def count_sublayer_flops(planned: PlannedSublayer, sizes: Sizes, time: int, memory: int = 0, batch: int = 1) -> int:
    """Return the FLOPs of one sublayer; see :func:`count_flops` for the arguments."""
    return flops_by_operator(planned, sizes, time, memory, batch).total()


@lru_cache(_CACHE_SIZE)
def flops_by_operator(
    planned: PlannedSublayer,
    sizes: Sizes,
    time: int,
    memory: int = 0,
    batch: int = 1,
) -> Counter[Any]:
    """Return the FLOPs of one sublayer by torch operator.

    If the plan does not specify the producer that the sublayer reads from, the first kind of sublayer that can be its
    producer is used, without settings.
    """
    return _Pass(sizes, time, memory, batch).count(planned)


@lru_cache(_CACHE_SIZE)
def attention_calls(planned: PlannedSublayer, sizes: Sizes, time: int, memory: int = 0) -> tuple[AttentionCall, ...]:
    """Return a sublayer's attention calls as back ends see them, without terms that the network adds to all scores."""
    found: list[AttentionCall] = []

    def record(given: AttentionInputs) -> str:
        found.append(AttentionCall.of(given))
        return "eager"

    _Pass(sizes, time, memory, 1, record).count(planned)
    return tuple(found)


class _Pass:
    """A forward pass through individual sublayers of a network with given sizes, on the meta device.

    One position per sequence is marked as global for ``s[global=given]``.
    """

    def __init__(
        self,
        sizes: Sizes,
        time: int,
        memory: int,
        batch: int,
        back_end: Callable[..., str] = lambda *_: "eager",
    ):
        self.sizes = sizes
        c = sizes.embed_dim
        heads = sizes.num_heads
        self.x_BTC = _empty(batch, time, c)
        self.memory_BMC = None
        if memory:
            self.memory_BMC = _empty(batch, memory, c)
        if sizes.direction == CAUSAL:
            positions = RelativePositions(
                _empty(memory + time + 1, c),
                _empty(heads, c // heads),
                _empty(heads, c // heads),
            )
            self.shared = Context(Scores(is_causal=True), back_end, positions)
        else:
            scores = Scores(
                given_BK=_empty(batch, time),
                given_places_BG=_empty(batch, 1, dtype=torch.long),
            )
            self.shared = Context(scores, back_end)

    def count(self, planned: PlannedSublayer) -> Counter[Any]:
        """Run a sublayer and the producers that it reads from; return the sublayer's FLOPs by operator."""
        reads = planned.kind.reads
        if not reads:
            return self.run(self.build(planned), {})[1]
        producer = planned.producer
        if producer is None:
            producer = next(PlannedSublayer(kind) for kind in kinds() if reads in kind.hands_on)
        sublayer = self.build(replace(planned, producer=producer))
        return self.run(sublayer, self.handed_on(producer, reads))[1]

    def build(self, planned: PlannedSublayer) -> nn.Module:
        options = _options(self.sizes, self.x_BTC.size(1))
        with _SkipInit():
            return build_sublayer(planned.kind.module(self.sizes.direction), options, planned)

    def handed_on(self, producer: PlannedSublayer, what: str) -> SharedState:
        """Return the state that a producer passes to sublayers that read `what`."""
        below: SharedState = {}
        if producer.producer and producer.kind.reads:
            below = self.handed_on(producer.producer, producer.kind.reads)
        sublayer = self.build(replace(producer, consumers=(what,)))
        return self.run(sublayer, below)[0]

    def run(self, sublayer: nn.Module, below: SharedState) -> tuple[SharedState, Counter[Any]]:
        """Return the state that a sublayer passes on, and its FLOPs by operator."""
        memory: tuple[Tensor, ...] = ()
        if sublayer.attends and self.memory_BMC is not None:
            memory = (self.memory_BMC,)
        with torch.no_grad(), _Counter() as counter:
            _, handed_on = sublayer(self.x_BTC, below, self.shared, *memory)
        return handed_on, counter.by_operator


class _SkipInit(TorchFunctionMode):
    """A mode that skips random initialization on the meta device, for which torch would import its compiler."""

    def __torch_function__(
        self,
        function: Callable,
        types: object,
        args: tuple = (),
        kwargs: Optional[dict[str, Any]] = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_from_init = getattr(function, "__module__", "") == nn.init.__name__
        if is_from_init or function in (Tensor.normal_, Tensor.uniform_):
            if args:
                return args[0]
            return kwargs["tensor"]
        with META:
            return function(*args, **kwargs)


def _empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, device=META, dtype=dtype)


def _options(sizes: Sizes, time: int = 0) -> SublayerOptions:
    """Return a network's sublayer options; for encoders, the options allow inputs of at least `time` tokens."""
    longest = 0
    if isinstance(sizes, EncoderSizes):
        longest = max(sizes.max_positions, time)
    return SublayerOptions(
        embed_dim=sizes.embed_dim,
        ffn_embed_dim=sizes.ffn_embed_dim,
        num_heads=sizes.num_heads,
        activation=nn.Identity(),
        max_positions=longest,
        is_causal=sizes.direction == CAUSAL,
        linear_bias=sizes.linear_bias,
    )


@dataclass(frozen=True)
class _Parameters:
    """A sublayer's parameter counts.

    Attributes:
        own: the number of parameters that are not shared with other sublayers.
        shared: the counts of shared parameters by name, such as Linformer's single projection for all layers.
        matrices: the number of unshared parameters in linear layers.
        experts: the number of unshared parameters in experts.
    """

    own: int
    shared: Mapping[str, int]
    matrices: int
    experts: int


@lru_cache(_CACHE_SIZE)
def _sublayer_parameters(planned: PlannedSublayer, sizes: Sizes) -> _Parameters:
    options = _options(sizes)
    with _SkipInit():
        inner = build_sublayer(planned.kind.module(sizes.direction), options, planned)
        sublayer: nn.Module = inner
        if inner.is_residual:
            norm = NormOptions(type=sizes.norm, has_bias=sizes.norm_bias)
            sublayer = ResidualSublayer(inner, sizes.embed_dim, norm=norm)
    shared = {name: each for name, each in options.common.items() if isinstance(each, nn.Parameter)}
    own = set(sublayer.parameters()) - set(shared.values())
    linears = [each for each in sublayer.modules() if isinstance(each, Linear)]
    experts = nn.ModuleList(each.experts for each in sublayer.modules() if isinstance(each, Experts))
    return _Parameters(
        own=_count_numbers(own),
        shared={name: weight.numel() for name, weight in shared.items()},
        matrices=sum(each.weight.numel() for each in linears),
        experts=_count_numbers(experts.parameters()),
    )


def _count_numbers(weights: Iterable[Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


@dataclass(frozen=True)
class _OtherCosts:
    """Costs outside the sublayers: parameters, and FLOPs per input token and per predicted token."""

    parameters: int
    flops_of_input: int
    flops_of_prediction: int


def _outside(sizes: Sizes) -> _OtherCosts:
    return _outside_of_any(replace(sizes, ffn_embed_dim=1))


@lru_cache
def _outside_of_any(sizes: Sizes) -> _OtherCosts:
    """Count the costs on a network with one identity sublayer and a head; the feed-forward width does not matter."""
    how: dict[str, Any] = {
        "pattern": next(kind.letter for kind in kinds() if kind.is_identity),
        "vocab_size": sizes.vocab_size,
        "embed_dim": sizes.embed_dim,
        "ffn_embed_dim": sizes.ffn_embed_dim,
        "num_heads": sizes.num_heads,
        "norm": sizes.norm,
        "norm_bias": sizes.norm_bias,
        "linear_bias": sizes.linear_bias,
    }
    token = _empty(1, 1, dtype=torch.long)
    features = _empty(1, sizes.embed_dim)

    if isinstance(sizes, CausalSizes):
        with _SkipInit():
            decoder = CausalDecoder(
                mem_len=0,
                normalize_before=sizes.normalize_before,
                cutoffs=sizes.cutoffs,
                div_val=sizes.div_val,
                **how,
            )
            own = None
            if sizes.untied_softmax:
                own = AdaptiveEmbedding(sizes.vocab_size, sizes.embed_dim, sizes.cutoffs, sizes.div_val)
            softmax = AdaptiveSoftmax(decoder.embedding, own)
        of_input = _count(lambda: [band.embed(token) for band in decoder.embedding.bands])
        of_prediction = _count(lambda: softmax.first_scores(features, decoder.embedding))
        parts: tuple[nn.Module, nn.Module] = (decoder, softmax)
    else:
        assert isinstance(sizes, EncoderSizes)
        with _SkipInit():
            encoder = Encoder(
                max_positions=sizes.max_positions,
                padding_idx=None,  # type: ignore[arg-type]  # a one-token vocabulary has none
                relative_position_buckets=sizes.relative_position_buckets,
                token_types=sizes.token_types,
                no_token_positional_embeddings=sizes.no_token_positional_embeddings,
                **how,
            )
            assert encoder.embed_tokens is not None, "the encoder has a vocabulary"
            head = MaskedLMHead(
                sizes.embed_dim,
                encoder.embed_tokens,
                activation=nn.Identity(),
                norm=encoder.norm,
                linear_bias=sizes.linear_bias,
                is_plain=sizes.plain_lm_head,
                is_untied=sizes.untied_lm_head,
            )
        dense = head.dense or nn.Identity()
        of_input = 0
        of_prediction = _count(lambda: F.linear(dense(features), head.weight))
        parts = (encoder, head)

    parameters: set[nn.Parameter] = set()  # a set, to count shared parameters once
    for part in parts:
        parameters.update(part.parameters())
    return _OtherCosts(_count_numbers(parameters), of_input, of_prediction)


class _Counter(TorchDispatchMode):
    """A FLOP counter for the meta device that uses torch's formulas.

    It works like :class:`torch.utils.flop_counter.FlopCounterMode` but does not import torch's compiler, which takes
    two seconds. Many of torch's meta kernels import the compiler too; :func:`_shape_of` avoids them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[Any] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        operator: Any,
        types: object,
        args: tuple = (),
        kwargs: Optional[dict[str, Any]] = None,
    ) -> Any:
        kwargs = kwargs or {}
        shape = _shape_of(operator, args)
        if shape is None:
            output = operator(*args, **kwargs)
        else:
            output = _empty(*shape)
        formula = flop_registry.get(operator.overloadpacket)
        if formula is not None:
            self.by_operator[operator.overloadpacket] += formula(*args, **kwargs, out_val=output)
        return output


def _shape_of(operator: Any, args: tuple) -> Optional[tuple[int, ...]]:  # noqa: PLR0911
    """Return the shape of a common operator's fp32 output; None for other operators, which are left to torch."""
    operands = args[0] if operator is aten.cat.default else args
    tensors = [each for each in operands if isinstance(each, Tensor)]
    if any(each.dtype != torch.float32 for each in tensors):
        return None
    if operator in (aten.mm.default, aten.bmm.default, aten.addmm.default):
        return *tensors[-2].shape[:-1], tensors[-1].size(-1)
    if operator in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor):
        return torch.broadcast_shapes(*(each.shape for each in tensors))
    if operator is aten.glu.default:
        *before, last = tensors[0].shape  # sublayers use it only along the last dimension
        return *before, last // 2
    if operator is aten.convolution.default:
        stride, padding, dilation = args[3:6]
        if tuple(stride) == tuple(dilation) == (1,):
            batch, _, time = tensors[0].shape
            channels, _, width = tensors[1].shape
            return batch, channels, time + 2 * padding[0] - width + 1
    if operator is aten.cat.default:
        dim = args[1] if len(args) > 1 else 0
        shape = list(tensors[0].shape)
        shape[dim] = sum(each.size(dim) for each in tensors)
        return tuple(shape)
    return None


def _count(compute: Callable[[], object]) -> int:
    with torch.no_grad(), _Counter() as counter:
        compute()
    return counter.by_operator.total()
