"""The memory of text streams, carried over from batch to batch and, via checkpoints, from run to run."""

import logging
from collections.abc import Mapping
from typing import Any, Optional, Union

import torch
from torch import Tensor, distributed

from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory

logger = logging.getLogger(__name__)

CHECKPOINT_KEY = "stream_memory"  # the memory's key in a checkpoint's extra_state
RunSettings = Mapping[str, Union[int, str]]  # named values that must match for a run to restore a saved memory


class CarriedMemory:
    """The memory of text streams, carried over from one segment to the next.

    If the data skips segments, the memory is cleared, so a segment never attends to text that does not precede it.

    Attributes:
        memory: the memory of the segments before `next_segment`.
        next_segment: the index of the only segment that may use the memory.
    """

    def __init__(self) -> None:
        self.memory = StreamMemory()
        self.next_segment = 0

    def before(self, segment: int) -> StreamMemory:
        """Return the memory to use for `segment`; it is empty at the start of an epoch and after skipped segments."""
        if segment != self.next_segment and segment and self.memory.length:
            logger.warning(
                f"the data continues at segment {segment}, but the memory ends before segment {self.next_segment}: "
                "the streams start with an empty memory"
            )
        if segment != self.next_segment or segment == 0:
            self.memory.clear()
        return self.memory

    def has_read(self, segment: int) -> None:
        """Record that the memory now includes `segment`.

        Non-finite values are set to 0, because they would spread to all later segments.
        """
        self.memory.states = [torch.nan_to_num(state, nan=0.0, posinf=0.0, neginf=0.0) for state in self.memory.states]
        self.next_segment = segment + 1

    def gather(self, shape: RunSettings) -> Optional[dict[str, Any]]:
        """Gather the memory of all workers for a checkpoint. All workers must call this method.

        Args:
            shape: values to save with the memory, which :meth:`restore` compares with the values of the resumed run.

        Returns:
            On the first worker, a dictionary with these values, the next segment, and the memory as tensors (total
            rows, M, C). None on all other workers, or if the workers' memories differ in length.
        """
        states = [state.detach() for state in self.memory.states]
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            lengths: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(lengths, (self.next_segment, self.memory.length))
            if len(set(lengths)) > 1:
                logger.warning("the workers' memories differ in length, so they are not saved in the checkpoint")
                return None
            states = [_gather_rows(state) for state in states]
            if distributed.get_rank() > 0:
                return None
        return {**shape, "next_segment": self.next_segment, "states": [state.cpu() for state in states]}

    def restore(self, saved: dict[str, Any], shape: RunSettings, rows: slice) -> None:
        """Restore this worker's rows of a saved memory, or warn and clear the memory if the saved one does not match.

        Args:
            saved: the result of :meth:`gather`.
            shape: the values that must equal the saved ones.
            rows: this worker's rows.
        """
        odd = []
        for name, value in shape.items():
            old = saved.get(name, "")
            if old != value:
                odd.append(f"{name} {old}, now {value}")
        if odd:
            logger.warning(
                f"the memory in the checkpoint does not match this run ({'; '.join(odd)}): the streams start with an "
                "empty memory"
            )
            self.memory.clear()
            return
        self.memory.states = [state[rows].clone() for state in saved["states"]]
        self.next_segment = saved["next_segment"]
        logger.info("restored a memory of %d tokens per stream from the checkpoint", self.memory.length)


def _gather_rows(state_BMC: Tensor) -> Tensor:
    """Return all workers' rows on the first worker, and the worker's own rows on every other worker.

    The caller gathers one sublayer after the other, because the memories of all sublayers may not fit on one GPU.
    """
    world = distributed.get_world_size()
    first = distributed.get_rank() == 0
    if not first:
        distributed.gather(state_BMC.contiguous(), dst=0)
        return state_BMC
    parts = [torch.empty_like(state_BMC) for _ in range(world)]
    distributed.gather(state_BMC.contiguous(), parts, dst=0)
    return torch.cat(parts).cpu()


def with_memory(sample: dict[str, Any], memory: StreamMemory) -> dict[str, Any]:
    """Return a copy of a batch with the memory added to the model's inputs.

    The batch is copied because fairseq keeps the first batch and reuses it.
    """
    return {**sample, "net_input": {**sample["net_input"], "memory": memory}}
