"""Parameters and FLOPs of a pattern in given sizes, counted on modules that are built on torch's meta device.

There a weight has a shape and takes no memory, and nothing is computed. So what counts is the module itself: its
parameters, and in its forward pass what :class:`torch.utils.flop_counter.FlopCounterMode` sees. Each sublayer is
counted once for its settings and sizes, and a pattern is a sum: searches and tables ask for thousands of patterns.

FLOPs are twice the multiply-adds of the matrix products. Elementwise work (softmax, LayerNorm, activations,
embeddings, biases) does not count, as in PAR's Table 6. An attention counts what it shows its queries, see
:mod:`lazyformer_fairseq.modules.attention.counted`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lazyformer_fairseq.modules.attention import counted
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
from lazyformer_fairseq.patterns.kinds import CAUSAL, DISTRIBUTION, CausalSizes, EncoderSizes, Kind, Sizes, kinds

aten = torch.ops.aten
META = torch.device("meta")
_REMEMBERED = 2**14  # sublayers, in all sizes and lengths that a process asks for


@lru_cache(_REMEMBERED)
def _plan(pattern: str, direction: str, known: tuple[Kind, ...]) -> tuple[PlannedSublayer, ...]:
    return plan(pattern, direction)


def count_parameters(pattern: str, sizes: Sizes) -> int:
    """Parameters of the whole model; tied parameters count once.

    Raises:
        UserError: the pattern cannot be read.
    """
    sublayers = _plan(pattern, sizes.direction, kinds())
    own = sum(count_sublayer_parameters(planned, sizes) for planned in sublayers)
    return count_other_parameters(sizes) + own + sum(count_common_parameters(sublayers, sizes).values())


def count_sublayer_parameters(planned: PlannedSublayer, sizes: Sizes) -> int:
    """Parameters of one sublayer's own, its LayerNorm included."""
    return _sublayer_parameters(planned, sizes)[0]


def count_matrix_parameters(pattern: str, sizes: Sizes) -> int:
    """Those of sublayers' linear maps, which Muon takes."""
    sublayers = _plan(pattern, sizes.direction, kinds())
    return sum(_sublayer_parameters(planned, sizes)[2] for planned in sublayers)


def count_experts_elsewhere(planned: PlannedSublayer, sizes: Sizes, processes: int) -> int:
    """Parameters of a sublayer's experts that others hold of so many processes; see modules/shared_experts.py."""
    if (experts := planned.values.get("experts", 0)) % processes:
        return 0
    if experts:
        return _sublayer_parameters(planned, sizes)[3] * (processes - 1) // processes
    return 0


def count_common_parameters(sublayers: Iterable[PlannedSublayer], sizes: Sizes) -> dict[str, int]:
    """What sublayers of one network share, by name, such as Linformer's one projection of all layers."""
    found: dict[str, int] = {}
    for planned in sublayers:
        found |= _sublayer_parameters(planned, sizes)[1]
    return found


def count_other_parameters(sizes: Sizes) -> int:
    """Parameters outside the sublayers: embeddings, head, biases that sublayers share."""
    return _outside(sizes).parameters


def count_flops(
    pattern: str,
    sizes: Sizes,
    time: int,
    memory: int = 0,
    batch: int = 1,
    predicted: Optional[int] = None,
) -> int:
    """FLOPs of one forward pass.

    Args:
        pattern: see :mod:`lazyformer_fairseq.patterns.grammar`.
        sizes: of an encoder with its masked-LM head, or of a causal model with its softmax.
        time: T, tokens per sequence.
        memory: M, remembered positions before them; their keys and values are projected again. Causal models only.
        batch: sequences.
        predicted: tokens per sequence that the head predicts; by default all. Only the first band of an adaptive
            softmax counts: the further ones depend on the words.

    Raises:
        UserError: the pattern cannot be read, or built, or takes no input as long.
    """
    if predicted is None:
        predicted = time
    outside = _outside(sizes)
    sublayers = _plan(pattern, sizes.direction, kinds())
    within = sum(count_sublayer_flops(planned, sizes, time, memory, batch) for planned in sublayers)
    return batch * (time * outside.flops_of_input + predicted * outside.flops_of_prediction) + within


def count_sublayer_flops(planned: PlannedSublayer, sizes: Sizes, time: int, memory: int = 0, batch: int = 1) -> int:
    """FLOPs of one sublayer; arguments as for :func:`count_flops`."""
    return sum(sublayer_flops(planned, sizes, time, memory, batch))


class Flops(NamedTuple):
    """FLOPs of a sublayer's forward pass.

    Attributes:
        linear: of products with weights, of scores by distance, and of attention that no back end computes.
        scores: of queries and keys.
        values: of weighted sums.
    """

    linear: int
    scores: int = 0
    values: int = 0


@lru_cache(_REMEMBERED)
def sublayer_flops(planned: PlannedSublayer, sizes: Sizes, time: int, memory: int = 0, batch: int = 1) -> Flops:
    """FLOPs of one sublayer, as :func:`count_sublayer_flops`.

    One whose plan does not say what it reads, reads the first kind that hands that on, without settings.
    """
    pass_ = _Pass(sizes, time, memory, batch)
    reads = planned.kind.reads
    producer = planned.producer or next((PlannedSublayer(kind) for kind in kinds() if reads in kind.hands_on), None)
    if reads:
        below = pass_.handed_on(producer, reads)
    else:
        below = {}
    sublayer = pass_.build(planned if producer is None else replace(planned, producer=producer))
    _, found = pass_.run(sublayer, below)
    scores = found[counted.COMPARE]
    values = found[counted.WEIGH]
    return Flops(found.total() - scores - values, scores, values)


class _Pass:
    """A forward pass through single sublayers of a network of these sizes, on the meta device.

    Of positions that a caller of a network gives, for ``s[global=given]``, there is one.
    """

    def __init__(self, sizes: Sizes, time: int, memory: int, batch: int):
        self.sizes = sizes
        c = sizes.embed_dim
        heads = sizes.num_heads
        self.x_BTC = _empty(batch, time, c)
        if memory:
            self.memory_BMC = _empty(batch, memory, c)
        else:
            self.memory_BMC = None
        if sizes.direction == CAUSAL:
            positions = RelativePositions(
                _empty(memory + time + 1, c),
                _empty(heads, c // heads),
                _empty(heads, c // heads),
            )
            self.shared = Context(Scores(is_causal=True), lambda *_: "eager", positions)
        else:
            given = {"given_BK": _empty(batch, time), "given_places_BG": _empty(batch, 1, dtype=torch.long)}
            self.shared = Context(Scores(**given), lambda *_: "eager")

    def build(self, planned: PlannedSublayer) -> nn.Module:
        options = _options(self.sizes, self.x_BTC.size(1))
        with _WithoutNumbers():
            return build_sublayer(planned.kind.module(self.sizes.direction), options, planned)

    def handed_on(self, producer: PlannedSublayer, what: str) -> SharedState:
        """What a sublayer hands on, that `what` is read of."""
        if producer.producer:
            below = self.handed_on(producer.producer, producer.kind.reads)
        else:
            below = {}
        return self.run(self.build(replace(producer, consumers=(what,))), below)[0]

    def run(self, sublayer: nn.Module, below: SharedState) -> tuple[SharedState, Counter[Any]]:
        """What it hands on, and its FLOPs by operator."""
        if sublayer.attends and self.memory_BMC is not None:
            memory = (self.memory_BMC,)
        else:
            memory = ()
        with torch.no_grad(), _Counter() as counter:
            return sublayer(self.x_BTC, below, self.shared, *memory)[1], counter.by_operator


class _WithoutNumbers(TorchFunctionMode):
    """Modules are built on the meta device, and nothing is drawn: torch would import its compiler for that."""

    def __torch_function__(
        self,
        function: Callable,
        types: object,
        args: tuple = (),
        kwargs: Optional[dict[str, Any]] = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in (Tensor.normal_, Tensor.uniform_) or getattr(function, "__module__", "") == nn.init.__name__:
            if args:
                return args[0]
            return kwargs["tensor"]
        with META:
            return function(*args, **kwargs)


def _empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, device=META, dtype=dtype)


def _options(sizes: Sizes, time: int = 0) -> SublayerOptions:
    """Of a network; an encoder's takes inputs of `time` tokens at least."""
    if isinstance(sizes, EncoderSizes):
        longest = max(sizes.max_positions, time)
    else:
        longest = 0
    widths = (sizes.embed_dim, sizes.ffn_embed_dim, sizes.num_heads)
    is_causal = sizes.direction == CAUSAL
    how = {"max_positions": longest, "is_causal": is_causal, "linear_bias": sizes.linear_bias}
    return SublayerOptions(*widths, activation=nn.Identity(), **how)


def _parts(sizes: Sizes) -> dict[str, Any]:
    return {"norm": sizes.norm, "norm_bias": sizes.norm_bias, "linear_bias": sizes.linear_bias}


@lru_cache(_REMEMBERED)
def _sublayer_parameters(planned: PlannedSublayer, sizes: Sizes) -> tuple[int, Mapping[str, int], int, int]:
    """A sublayer's own, by name those that it shares, and of its own those of linear maps and those of experts."""
    options = _options(sizes)
    with _WithoutNumbers():
        sublayer = build_sublayer(planned.kind.module(sizes.direction), options, planned)
        if sublayer.is_residual:
            norm = NormOptions(kind=sizes.norm, has_bias=sizes.norm_bias)
            sublayer = ResidualSublayer(sublayer, sizes.embed_dim, norm=norm)
    common = {name: each for name, each in options.common.items() if isinstance(each, nn.Parameter)}
    own = set(sublayer.parameters()) - set(common.values())
    matrices = sum(each.weight.numel() for each in sublayer.modules() if isinstance(each, Linear))
    experts = {
        weight for each in sublayer.modules() if isinstance(each, Experts) for weight in each.experts.parameters()
    }
    of_all, of_experts = (sum(map(torch.numel, each)) for each in (own, experts))
    return of_all, {name: each.numel() for name, each in common.items()}, matrices, of_experts


class _Outside(NamedTuple):
    """What is around the sublayers: parameters, and FLOPs of a token that is read and of one that is predicted."""

    parameters: int
    flops_of_input: int
    flops_of_prediction: int


def _outside(sizes: Sizes) -> _Outside:
    return _outside_of_any(replace(sizes, ffn_embed_dim=1))


@lru_cache
def _outside_of_any(sizes: Sizes) -> _Outside:
    """Counted on a network of one identity, with its head, whatever the width of feed-forwards."""
    identity = next(kind.letter for kind in kinds() if kind.is_identity)
    widths = (sizes.vocab_size, sizes.embed_dim, sizes.ffn_embed_dim, sizes.num_heads)
    token = _empty(1, 1, dtype=torch.long)
    features = _empty(1, sizes.embed_dim)
    if isinstance(sizes, CausalSizes):
        of_softmax = {"cutoffs": sizes.cutoffs, "div_val": sizes.div_val, **_parts(sizes)}
        with _WithoutNumbers():
            network = CausalDecoder(identity, *widths, 0, normalize_before=sizes.normalize_before, **of_softmax)
            if sizes.untied_softmax:
                own = AdaptiveEmbedding(*widths[:2], sizes.cutoffs, sizes.div_val)
            else:
                own = None
            head = AdaptiveSoftmax(network.embedding, own)
        of_input = _count(lambda: [band.embed(token) for band in network.embedding.bands])
        of_prediction = _count(lambda: head.first_scores(features, network.embedding))
    else:
        assert isinstance(sizes, EncoderSizes)
        tables = ("relative_position_buckets", "token_types", "no_token_positional_embeddings")
        of_tables = {name: getattr(sizes, name) for name in tables}
        of_head = {"is_plain": sizes.plain_lm_head, "is_untied": sizes.untied_lm_head}
        with _WithoutNumbers():
            network = Encoder(identity, *widths, sizes.max_positions, padding_idx=None, **of_tables, **_parts(sizes))
            of_head |= {"norm": network.norm, "linear_bias": sizes.linear_bias}
            head = MaskedLMHead(sizes.embed_dim, network.embed_tokens, nn.Identity(), **of_head)
        dense = head.dense or nn.Identity()
        of_input = 0
        of_prediction = _count(lambda: F.linear(dense(features), head.weight))
    parameters = {*network.parameters(), *head.parameters()}  # those that they share are there once
    return _Outside(sum(map(torch.numel, parameters)), of_input, of_prediction)


class _Counter(TorchDispatchMode):
    """Counts by torch's formulas what is computed on the meta device.

    It does what :class:`torch.utils.flop_counter.FlopCounterMode` does, which imports two seconds of torch's compiler
    first, as do many of torch's own answers on the meta device: see :func:`_shape_of`.
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


def _shape_of(operator: Any, args: tuple) -> Optional[tuple[int, ...]]:
    """What the most frequent operators make of numbers in single precision; None for others, which torch knows."""
    tensors = [each for each in (args[0] if operator is aten.cat.default else args) if isinstance(each, Tensor)]
    if any(each.dtype != torch.float32 for each in tensors):
        return None
    if operator in (aten.mm.default, aten.bmm.default, aten.addmm.default):
        return *tensors[-2].shape[:-1], tensors[-1].size(-1)
    if operator in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor):
        return torch.broadcast_shapes(*(each.shape for each in tensors))
    if operator is aten.glu.default:
        *before, last = tensors[0].shape  # of the last dimension alone, as sublayers take it
        return *before, last // 2
    if operator is aten.convolution.default and tuple(args[3]) == tuple(args[5]) == (1,):  # a stride and a dilation
        (batch, _, time), (channels, _, width) = (each.shape for each in tensors[:2])
        return batch, channels, time + 2 * args[4][0] - width + 1
    if operator is aten.cat.default:
        if len(args) > 1:
            dim = args[1]
        else:
            dim = 0
        shape = list(tensors[0].shape)
        shape[dim] = sum(each.size(dim) for each in tensors)
        return tuple(shape)
    return None


def _count(compute: Callable[[], object]) -> int:
    with torch.no_grad(), _Counter() as counter:
        compute()
    return counter.by_operator.total()


# Products of (T, T) with (T, D), or of (T, D) with (D, T), of a lazy block of m layers: its `s` and the m - 1 `l` that
# read it. Each is 2 B T^2 C FLOPs. Forward with queries or keys, forward with values; backward with queries or keys,
# backward with values or the output's gradient.
Products = tuple[int, int, int, int]
PRODUCTS: dict[str, Callable[[int], Products]] = {
    # QK^T, and P V of each layer; dQ and dK; each layer's P^T dO and dO V^T
    "eager": lambda m: (1, m, 2, 2 * m),
    "materialize": lambda m: (1, m, 2, 2 * m),
    # Each layer is a fused attention of its own: two products; the backward pass computes QK^T once more.
    "recompute": lambda m: (m, m, 3 * m, 2 * m),
    # The same, but the backward pass goes over all twice, for the gradient of queries and for that of keys and values.
    "flex": lambda m: (m, m, 4 * m, 3 * m),
    # torch's attention where it is not fused: on a CPU with dropout.
    "unfused": lambda m: (m, m, 2 * m, 2 * m),
    # Each layer's QK^T and P V. Backward: an l takes QK^T and P^T dO; the s these two, each layer's dO V^T, dQ and dK.
    "fused": lambda m: (m, m, m + 2, 2 * m),
}


def block_flops(back_end: str, flops: Flops, layers: int, training: bool) -> int:
    """Of the attention of a block of this many layers whose ``s`` has `flops`; in training the backward pass too."""
    scores, values, backward_scores, backward_values = PRODUCTS[back_end](layers)
    if training:
        scores = scores + backward_scores
        values = values + backward_values
    return flops.scores * scores + flops.values * values


def makers_of_blocks(pattern: str) -> Iterator[PlannedSublayer]:
    """Yields each sublayer that makes a distribution, lowest first.

    Raises:
        UserError: the pattern cannot be read.
    """
    for planned in plan(pattern):
        if planned.kind.computes_scores:
            yield planned


def layers_of_block(maker: PlannedSublayer) -> int:
    """m, a sublayer that makes a distribution and its consumers."""
    return 1 + maker.consumers.count(DISTRIBUTION)


def count_encoder_flops(
    pattern: str,
    sizes: Sizes,
    time: int,
    batch: int = 1,
    predicted: int = 0,
    back_end: Callable[[PlannedSublayer], str] = lambda maker: "eager",
    training: bool = False,
) -> int:
    """FLOPs that an encoder really performs; they depend on how its attention runs.

    With ``eager``, and without training, this is :func:`count_flops`. A back end that recomputes a distribution pays
    for it. The backward pass of a linear map, or of a kind's own products, costs twice its forward pass.

    Args:
        pattern, sizes, time, batch: as for :func:`count_flops`.
        predicted: tokens that the masked-LM head predicts in the whole batch; 0 for no head.
        back_end: by the sublayer that makes its distribution, a key of :data:`PRODUCTS`.
        training: count the backward pass too.
    """
    if training:
        passes = 3
    else:
        passes = 1
    total = passes * predicted * _outside(sizes).flops_of_prediction
    for planned in plan(pattern, sizes.direction):
        flops = sublayer_flops(planned, sizes, time, 0, batch)
        total += passes * flops.linear
        if planned.kind.computes_scores:
            total += block_flops(back_end(planned), flops, layers_of_block(planned), training)
        elif planned.kind.reads != DISTRIBUTION:  # a block's count includes its consumers
            total += passes * (flops.scores + flops.values)
    return total
