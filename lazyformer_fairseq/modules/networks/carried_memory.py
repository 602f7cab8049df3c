"""The memory of streams of text, carried from batch to batch, and from run to run by a checkpoint."""

import logging
from collections.abc import Mapping
from typing import Any, Optional, Union

import torch
from torch import Tensor, distributed

from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory

logger = logging.getLogger(__name__)

CHECKPOINT_KEY = "stream_memory"  # in a checkpoint's extra_state
Shape = Mapping[str, Union[int, str]]  # what must be equal for a memory to fit, by name


class CarriedMemory:
    """Memory of streams from segment to segment. After a jump in the text it starts empty, never with a wrong past.

    Attributes:
        memory: of the segments before `next_segment`.
        next_segment: the segment that reads the memory.
    """

    def __init__(self) -> None:
        self.memory = StreamMemory()
        self.next_segment = 0

    def before(self, segment: int) -> StreamMemory:
        """Return the memory to read `segment` with: empty at the start of each epoch's text and after a jump."""
        if segment != self.next_segment and segment and self.memory.length:
            logger.warning(
                f"the data continues at segment {segment}, but the memory ends before {self.next_segment}: streams "
                "start with empty memory"
            )
        if segment != self.next_segment or segment == 0:
            self.memory.clear()
        return self.memory

    def has_read(self, segment: int) -> None:
        """Record that the memory holds `segment` too. Numbers that are not finite become 0, for they would spread."""
        self.memory.states = [torch.nan_to_num(state, 0.0, 0.0, 0.0) for state in self.memory.states]
        self.next_segment = segment + 1

    def gather(self, shape: Shape) -> Optional[dict[str, Any]]:
        """Return what a checkpoint keeps: numbers and tensors (rows of all workers, M, C). All workers must call it.

        Returns:
            None on all workers but the first, and where the workers' memories differ in length.
        """
        states = [state.detach() for state in self.memory.states]
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            lengths: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(lengths, (self.next_segment, self.memory.length))
            if len(set(lengths)) > 1:
                logger.warning("the workers' memories are of different length, so the checkpoint keeps none")
                return None
            states = [_gather_rows(state) for state in states]
            if distributed.get_rank() > 0:
                return None
        return {**shape, "next_segment": self.next_segment, "states": [state.cpu() for state in states]}

    def restore(self, saved: dict[str, Any], shape: Shape, rows: slice) -> None:
        """Take this worker's `rows` of what :meth:`gather` gave; if that does not fit, warn and stay empty."""
        pairs = {name: (saved.get(name, ""), value) for name, value in shape.items()}
        if odd := [f"{name} {old}, now {new}" for name, (old, new) in pairs.items() if old != new]:
            logger.warning(f"the checkpoint's memory does not fit ({'; '.join(odd)}): streams start with empty memory")
            self.memory.clear()
            return
        self.memory.states = [state[rows].clone() for state in saved["states"]]
        self.next_segment = saved["next_segment"]
        logger.info("restored a memory of %d tokens a stream from the checkpoint", self.memory.length)


def _gather_rows(state_BMC: Tensor) -> Tensor:
    """Return the rows of all workers on the first one, elsewhere its own.

    It is called once per sublayer, because all together may not fit a GPU.
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
    """Return a copy with the memory, because fairseq keeps the first batch to use it again."""
    return {**sample, "net_input": {**sample["net_input"], "memory": memory}}
