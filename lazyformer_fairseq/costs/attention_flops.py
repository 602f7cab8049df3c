"""Matrix products of attention, by back end: how often each multiplies T x T by D, forward and backward."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION


@dataclass(frozen=True)
class Products:
    """Products of (T, T) with (T, D), or of (T, D) with (D, T), of a lazy block. Each is 2 B T^2 C FLOPs.

    Attributes:
        forward: as a function of m, the layers of the block: its ``s`` and the m - 1 ``l`` that read it.
        backward: likewise.
    """

    forward: Callable[[int], int]
    backward: Callable[[int], int]

    def count(self, layers: int, training: bool) -> int:
        """Products of a block of this many layers; in training the backward pass too."""
        return self.forward(layers) + (self.backward(layers) if training else 0)


_STORED = Products(
    # QK^T, and P V of each layer
    forward=lambda m: 1 + m,
    # each layer's P^T dO and dO V^T; dQ and dK
    backward=lambda m: 2 * m + 2,
)
PRODUCTS = {
    "eager": _STORED,
    "materialize": _STORED,
    # Each layer is a fused attention of its own: two products; the backward pass computes QK^T once more.
    "recompute": Products(forward=lambda m: 2 * m, backward=lambda m: 5 * m),
    # torch's attention where it is not fused: on a CPU with dropout.
    "unfused": Products(forward=lambda m: 2 * m, backward=lambda m: 4 * m),
    # Each layer's QK^T and P V. Backward: an l takes QK^T and P^T dO; the s these two, each layer's dO V^T, dQ and dK.
    "fused": Products(forward=lambda m: 2 * m, backward=lambda m: 2 * (m - 1) + m + 4),
}


def layers_of_blocks(pattern: str) -> Iterator[int]:
    """Yields m, a sublayer and its readers, for each sublayer that makes a distribution, lowest first.

    Raises:
        UserError: the pattern cannot be read.
    """
    for planned in plan(pattern):
        if DISTRIBUTION in planned.kind.hands_on:
            yield 1 + planned.readers.count(DISTRIBUTION)
