"""Parameters and FLOPs from pattern and sizes, by formula: searches and tables need not build a model.

FLOPs are twice the multiply-adds of the matrix products. Elementwise work (softmax, LayerNorm, activations,
embeddings, biases) does not count, as in PAR's Table 6 and in :class:`torch.utils.flop_counter.FlopCounterMode`; a test
checks these formulas against the latter. Each kind has its formula in its own file.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Optional

from lazyformer_fairseq.modules.sublayers.interface import Flops
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION
from lazyformer_fairseq.patterns.sizes import Sizes


def count_parameters(pattern: str, sizes: Sizes) -> int:
    """Parameters of the whole model; tied parameters count once.

    Raises:
        UserError: the pattern cannot be read.
    """
    sublayers = plan(pattern, sizes.direction)
    own = sum(count_sublayer_parameters(planned, sizes) for planned in sublayers)
    return sizes.count_other_parameters() + own + sum(count_common_parameters(sublayers, sizes).values())


def count_sublayer_parameters(planned: PlannedSublayer, sizes: Sizes) -> int:
    """Parameters of one sublayer's own, its LayerNorm included."""
    module = planned.kind.module(sizes.direction)
    norm = 2 * sizes.embed_dim if module.is_residual else 0
    return module.count_parameters(sizes, planned) + norm


def count_common_parameters(sublayers: Iterable[PlannedSublayer], sizes: Sizes) -> dict[str, int]:
    """What sublayers of one network share, by name, such as Linformer's one projection of all layers."""
    found: dict[str, int] = {}
    for planned in sublayers:
        found |= planned.kind.module(sizes.direction).count_common_parameters(sizes, planned)
    return found


@dataclass(frozen=True)
class Products:
    """Products of (T, T) with (T, D), or of (T, D) with (D, T), of a lazy block. Each is 2 B T^2 C FLOPs.

    All are functions of m, the layers of the block: its ``s`` and the m - 1 ``l`` that read it.

    Attributes:
        forward_scores, backward_scores: with queries or keys.
        forward_values, backward_values: with values or the output's gradient.
    """

    forward_scores: Callable[[int], int]
    forward_values: Callable[[int], int]
    backward_scores: Callable[[int], int]
    backward_values: Callable[[int], int]

    def forward(self, layers: int) -> int:
        return self.forward_scores(layers) + self.forward_values(layers)

    def backward(self, layers: int) -> int:
        return self.backward_scores(layers) + self.backward_values(layers)

    def count_flops(self, flops: Flops, layers: int, training: bool) -> int:
        """Of a block of this many layers whose ``s`` has `flops`; in training the backward pass too."""
        of_scores, of_values = self.forward_scores(layers), self.forward_values(layers)
        if training:
            of_scores, of_values = of_scores + self.backward_scores(layers), of_values + self.backward_values(layers)
        return flops.of_scores * of_scores + (flops.products - flops.of_scores) * of_values


_STORED = Products(
    # QK^T, and P V of each layer
    forward_scores=lambda m: 1,
    forward_values=lambda m: m,
    # dQ and dK; each layer's P^T dO and dO V^T
    backward_scores=lambda m: 2,
    backward_values=lambda m: 2 * m,
)
PRODUCTS = {
    "eager": _STORED,
    "materialize": _STORED,
    # Of the scores that a mask shows. Without a consumer it keeps nothing, and computes QK^T once more.
    "tiles": Products(lambda m: 1, lambda m: m, lambda m: 2 + (m == 1), lambda m: 2 * m),
    # Each layer is a fused attention of its own: two products; the backward pass computes QK^T once more.
    "recompute": Products(lambda m: m, lambda m: m, backward_scores=lambda m: 3 * m, backward_values=lambda m: 2 * m),
    # The same, but the backward pass goes over all twice, for the gradient of queries and for that of keys and values.
    "flex": Products(lambda m: m, lambda m: m, backward_scores=lambda m: 4 * m, backward_values=lambda m: 3 * m),
    # torch's attention where it is not fused: on a CPU with dropout.
    "unfused": Products(lambda m: m, lambda m: m, backward_scores=lambda m: 2 * m, backward_values=lambda m: 2 * m),
    # Each layer's QK^T and P V. Backward: an l takes QK^T and P^T dO; the s these two, each layer's dO V^T, dQ and dK.
    "fused": Products(lambda m: m, lambda m: m, backward_scores=lambda m: m + 2, backward_values=lambda m: 2 * m),
}


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


def count_flops(
    pattern: str, sizes: Sizes, time: int, memory: int = 0, batch: int = 1, predicted: Optional[int] = None
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
        UserError: the pattern cannot be read.
    """
    predicted = time if predicted is None else predicted
    outside = sizes.count_embedding_flops(batch * time) + sizes.count_head_flops(batch * predicted)
    sublayers = plan(pattern, sizes.direction)
    return outside + sum(count_sublayer_flops(planned, sizes, time, memory, batch) for planned in sublayers)


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
    passes = 3 if training else 1
    total = passes * sizes.count_head_flops(predicted)
    for planned in plan(pattern, sizes.direction):
        flops = planned.kind.module(sizes.direction).count_flops(sizes, planned, time, time, batch)
        total += passes * flops.linear
        if planned.kind.computes_scores:
            total += PRODUCTS[back_end(planned)].count_flops(flops, layers_of_block(planned), training)
        elif planned.kind.reads != DISTRIBUTION:  # a block's count includes its consumers
            total += passes * flops.products
    return total


def count_sublayer_flops(planned: PlannedSublayer, sizes: Sizes, time: int, memory: int = 0, batch: int = 1) -> int:
    """FLOPs of one sublayer; arguments as for :func:`count_flops`."""
    flops = planned.kind.module(sizes.direction).count_flops(sizes, planned, time, memory + time, batch)
    return flops.linear + flops.products
