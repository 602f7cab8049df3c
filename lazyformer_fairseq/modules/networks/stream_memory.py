"""What a stream of text remembers from one segment to the next (Transformer-XL, section 3.2)."""

from typing import Optional

import torch
from torch import Tensor


class StreamMemory:
    """The inputs that attending sublayers (``s`` and ``l``) had in the segments before, one row of a batch per stream.

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
        return self.states[0].size(1) if self.states else 0

    def clear(self) -> None:
        """Forgets everything: new streams start."""
        self.states = []

    def before(self, sublayer: int, x_BTC: Tensor) -> Optional[Tensor]:
        """The (B, M, C) of the attending sublayer of this number, on the device and in the precision of its input.

        None at the start of streams.
        """
        return self.states[sublayer].to(x_BTC) if self.states else None

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


def _last(memory_BMC: Optional[Tensor], x_BTC: Tensor, mem_len: int) -> Tensor:
    """The last `mem_len` positions of both, in storage of their own: a view would keep all of it alive."""
    kept = max(mem_len - x_BTC.size(1), 0)
    parts = [x_BTC[:, -mem_len:]]
    if memory_BMC is not None and kept:
        parts.insert(0, memory_BMC[:, -kept:])
    return torch.cat(parts, dim=1)
