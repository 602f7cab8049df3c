"""Dropout on a distribution that is never whole: its masks come piece by piece, and come again in the backward pass."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# A rate is a number of these: masks are drawn from 16 bits an entry, four entries at a time, which takes a quarter of
# the time of torch's own. 0.1 becomes 0.1000061, and what stays is scaled accordingly.
PARTS = 2**16
_SEEDS = 2**62


class Dropout(NamedTuple):
    """Of the ``s`` of a block and its consumers.

    Attributes:
        parts: of PARTS entries, how many are dropped on average.
        seeds: of each of these layers (L,), integers on the processor, which a GPU need not be waited for.
    """

    parts: int
    seeds: Tensor

    @classmethod
    def draw(cls, rate: float, layers: int) -> "Dropout":
        """With seeds from torch's generator, so that a resumed run draws the same; `rate` above 0, up to 1."""
        return cls(max(1, round(rate * PARTS)), torch.randint(_SEEDS, (layers,)))

    def of(self, layers: Sequence[int]) -> "Dropout":
        """That of some of the layers."""
        return self._replace(seeds=self.seeds[list(layers)])

    @property
    def scale(self) -> float:
        """By which an entry that stays is multiplied."""
        return PARTS / max(1, PARTS - self.parts)


class Masks:
    """Those of one layer, one after the other: a pass that asks for the same shapes in the same order gets the same.

    Args:
        dropout: of the block.
        layer: number of the layer in it.
        device: of the masks.
    """

    def __init__(self, dropout: Dropout, layer: int, device: torch.device):
        self.dropout, self.device = dropout, device
        seed = int(dropout.seeds[layer])
        self._numpy = np.random.SFC64(seed) if device.type == "cpu" else None
        self._torch = None if self._numpy else torch.Generator(device).manual_seed(seed)

    def draw(self, shape: Sequence[int]) -> Tensor:
        """True at entries that are dropped."""
        return self._integers(shape) <= self.dropout.parts - PARTS // 2 - 1  # 16 bits with a sign

    def _integers(self, shape: Sequence[int]) -> Tensor:
        if self._numpy is None:
            drawn = torch.empty(shape, dtype=torch.int16, device=self.device)
            return drawn.random_(-PARTS // 2, PARTS // 2, generator=self._torch)
        size = int(np.prod(shape))
        drawn = self._numpy.random_raw(-(-size // 4)).view(np.int16)
        return torch.from_numpy(drawn)[:size].view(*shape)
