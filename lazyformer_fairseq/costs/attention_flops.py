"""Matrix products of attention, by back end: how often T x T by D is multiplied, forward and backward."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lazyformer_fairseq.patterns.grammar import plan


@dataclass(frozen=True)
class Products:
    """Products of (T, T) with (T, D), or of (T, D) with (D, T), of a lazy block. Each is 2 B T^2 C FLOPs.

    Attributes:
        forward: as a function of m, the layers of the block: its ``s`` and the m - 1 ``l`` that read it.
        backward: likewise.
    """

    forward: Callable[[int], int]
    backward: Callable[[int], int]


_STORED = Products(
    # QK^T, and P V of each layer
    forward=lambda m: 1 + m,
    # each layer's P^T dO and dO V^T; dQ and dK
    backward=lambda m: 2 * m + 2,
)
PRODUCTS = {
    "eager": _STORED,
    "materialize": _STORED,
    # Each layer is a fused attention by itself: two products, and in the backward pass QK^T once more.
    "recompute": Products(forward=lambda m: 2 * m, backward=lambda m: 5 * m),
    # torch's attention where it is not fused: on a CPU with dropout.
    "unfused": Products(forward=lambda m: 2 * m, backward=lambda m: 4 * m),
    # Each layer's QK^T and P V. Backward: of an l QK^T and P^T dO; of the s these two, each layer's dO V^T, dQ and dK.
    "fused": Products(forward=lambda m: 2 * m, backward=lambda m: 2 * (m - 1) + m + 4),
}


def layers_of_blocks(pattern: str) -> Iterator[int]:
    """For each ``s``, lowest first, m: itself and the ``l`` that read it.

    Raises:
        UserError: the pattern cannot be read.
    """
    reads = [sublayer.reads for sublayer in plan(pattern)]
    for place, sublayer in enumerate(plan(pattern)):
        if sublayer.kind == "s":
            yield 1 + reads.count(place)


def count_products(pattern: str, back_end: Callable[[int], str], training: bool) -> int:
    """Products of a whole pattern.

    Args:
        pattern: see :mod:`lazyformer_fairseq.patterns.grammar`.
        back_end: the name of the back end that a block of m layers runs on, a key of PRODUCTS.
        training: the backward pass too.
    """
    total = 0
    for layers in layers_of_blocks(pattern):
        products = PRODUCTS[back_end(layers)]
        total += products.forward(layers) + (products.backward(layers) if training else 0)
    return total
