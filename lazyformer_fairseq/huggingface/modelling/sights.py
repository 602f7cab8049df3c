"""Which keys a query may look at, as masks of (query, key) by their places in the input."""

from typing import Optional

import torch
from torch import Tensor

from .attention import Attention


class Places:
    """Of T queries and T keys.

    Attributes:
        key_T: the place of each key.
        ahead_TT: of (query, key), how far ahead of the query the key is.
    """

    def __init__(self, attention: Attention):
        self.key_T = torch.arange(attention.x_BTC.size(1), device=attention.x_BTC.device)
        self.ahead_TT = self.key_T - self.key_T[:, None]

    def band(self, most: Optional[int], step: int = 1) -> Tensor:
        """(T, T): every `step`-th key to either side, `most` of them at most."""
        seen = self.ahead_TT % step == 0
        return seen if most is None else seen & (self.ahead_TT.abs() <= most * step)

    def block(self, size: int) -> Tensor:
        """(T, T): the keys of the query's own block of so many places."""
        blocks = self.key_T // size
        return blocks == blocks[:, None]

    def ends(self, size: int, last: int) -> Tensor:
        """(T, T): the last keys of every block."""
        return (self.key_T % size >= size - last).expand_as(self.ahead_TT)


def by_heads(first: Tensor, heads: int, second: Tensor, others: int) -> Tensor:
    """(N, T, T): what the first so many heads see, and what the others see."""
    return torch.cat([first.expand(heads, -1, -1), second.expand(others, -1, -1)])
