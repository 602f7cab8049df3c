"""The memory of streams of text (Transformer-XL, section 3.2)."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor


class StreamMemory:
    """Inputs that attending sublayers had in earlier segments, one row of a batch per stream.

    The caller of a model keeps it and passes it to the model with every segment. The model reads it and adds the new
    segment's inputs. Modules keep no state.

    Attributes:
        states: a detached (B, M, C) per attending sublayer, the lowest first; empty at the start of streams.
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
        """Tokens read before this segment: those remembered, unless a subclass counts them."""
        return self.length

    def clear(self) -> None:
        """Forget everything: new streams start."""
        self.states = []

    def by_sublayer(self, attends: Sequence[bool]) -> list[Optional[Tensor]]:
        """Return the (B, M, C) of each sublayer: None where it does not attend, and for all at the start of streams.

        Args:
            attends: whether each sublayer attends, the lowest first.
        """
        states = iter(self.states)
        return [next(states, None) if sublayer_attends else None for sublayer_attends in attends]

    def remember(self, inputs: list[Tensor], mem_len: int) -> None:
        """Add a segment, and keep the last `mem_len` tokens of memory and segment.

        Args:
            inputs: (B, T, C) per attending sublayer, the lowest first.
            mem_len: tokens to keep; 0 for no memory.
        """
        if mem_len == 0:
            self.clear()
            return
        states = []
        for number, x_BTC in enumerate(inputs):
            parts = [x_BTC.detach()[:, -mem_len:]]
            kept = max(mem_len - x_BTC.size(1), 0)
            if self.states and kept:
                parts.insert(0, self.states[number].to(x_BTC)[:, -kept:])
            states.append(torch.cat(parts, dim=1))  # a copy: a view would keep everything alive
        self.states = states

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Return plain tensors, for a checkpoint."""
        return {"states": list(self.states)}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Restore what :meth:`state_dict` returned. Tensors may be on any device; the model moves them."""
        self.states = list(state["states"])


class WholeMemory(StreamMemory):
    """Memory of a text that is being continued.

    Args:
        longest: most tokens to remember, as `mem_len` in training; None for all.

    Attributes:
        seen: tokens read so far; the caller counts them.
    """

    seen = 0

    def __init__(self, longest: Optional[int] = None):
        super().__init__()
        self.longest = longest

    def remember(self, inputs: list[Tensor], mem_len: int) -> None:  # noqa: ARG002
        """Add a segment; the decoder's `mem_len` does not count."""
        limit = self.longest
        if limit is None:
            limit = self.length + sum(x_BTC.size(1) for x_BTC in inputs[:1])
        super().remember(inputs, limit)
