"""The memory of text streams (Transformer-XL, section 3.2)."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor


class StreamMemory:
    """The attending sublayers' inputs from previous segments of B streams, with one batch row per stream.

    The caller keeps the memory and passes it to the model with every segment. The model attends to it and adds the new
    segment's inputs. Modules keep no state.

    Attributes:
        states: one detached tensor (B, M, C) per attending sublayer, from bottom to top; empty at the start of streams.
    """

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    @property
    def length(self) -> int:
        """M, the number of tokens in memory per stream."""
        if self.states:
            return self.states[0].size(1)
        return 0

    @property
    def seen(self) -> int:
        """The number of tokens processed before the next segment.

        This is the length of the memory, unless a subclass counts tokens itself.
        """
        return self.length

    def clear(self) -> None:
        """Clear the memory before new streams start."""
        self.states = []

    def by_sublayer(self, attends: Sequence[bool]) -> list[Optional[Tensor]]:
        """Return each sublayer's memory (B, M, C), or None at the start of streams or if the sublayer does not attend.

        Args:
            attends: whether each sublayer attends, from bottom to top.
        """
        states = iter(self.states)
        return [next(states, None) if sublayer_attends else None for sublayer_attends in attends]

    def remember(self, inputs: list[Tensor], mem_len: int) -> None:
        """Add a segment and keep the last `mem_len` tokens of memory and segment combined.

        Args:
            inputs: the inputs (B, T, C) of the attending sublayers, from bottom to top.
            mem_len: the number of tokens to keep; 0 for no memory.
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
            states.append(torch.cat(parts, dim=1))  # a copy, because a view would keep the whole input alive
        self.states = states

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Return the memory as plain tensors for a checkpoint."""
        return {"states": list(self.states)}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Load a memory saved by :meth:`state_dict`. Tensors may be on any device; the model moves them."""
        self.states = list(state["states"])


class WholeMemory(StreamMemory):
    """The memory for generating a continuation of a text; by default it keeps all tokens.

    Args:
        longest: the number of tokens to keep, such as the `mem_len` used during training; None for all.

    Attributes:
        seen: the number of tokens processed so far; the caller updates it.
    """

    seen = 0

    def __init__(self, longest: Optional[int] = None):
        super().__init__()
        self.longest = longest

    def remember(self, inputs: list[Tensor], mem_len: int) -> None:  # noqa: ARG002
        """Add a segment; `longest` overrides the decoder's `mem_len`."""
        limit = self.longest
        if limit is None:
            limit = self.length + sum(x_BTC.size(1) for x_BTC in inputs[:1])
        super().remember(inputs, limit)
