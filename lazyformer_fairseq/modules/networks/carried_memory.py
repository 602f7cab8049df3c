"""The memory of streams of text, carried from batch to batch and, through checkpoints, from run to run."""

import logging
from collections.abc import Mapping
from typing import Any, Optional, Union

import torch
from torch import Tensor, distributed

from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory

logger = logging.getLogger(__name__)

CHECKPOINT_KEY = "stream_memory"  # the key of the memory in the extra_state of a checkpoint
Shape = Mapping[str, Union[int, str]]  # values that must be equal for a saved memory to fit a run, by name


class CarriedMemory:
    """The memory of streams from segment to segment.

    After a jump in the text the memory is emptied, so that a segment never reads the memory of a wrong past.

    Attributes:
        memory: the memory of the segments before `next_segment`.
        next_segment: the number of the segment that may read the memory.
    """

    def __init__(self) -> None:
        self.memory = StreamMemory()
        self.next_segment = 0

    def before(self, segment: int) -> StreamMemory:
        """Return the memory for reading `segment`, which is empty at the start of an epoch and after a jump."""
        if segment != self.next_segment and segment and self.memory.length:
            logger.warning(
                f"the data continues at segment {segment}, but the memory ends before segment {self.next_segment}: "
                "streams start with an empty memory"
            )
        if segment != self.next_segment or segment == 0:
            self.memory.clear()
        return self.memory

    def has_read(self, segment: int) -> None:
        """Record that the memory now includes `segment`.

        Values that are not finite are set to 0, because they would spread to all later segments.
        """
        self.memory.states = [torch.nan_to_num(state, 0.0, 0.0, 0.0) for state in self.memory.states]
        self.next_segment = segment + 1

    def gather(self, shape: Shape) -> Optional[dict[str, Any]]:
        """Return the memory of all workers for a checkpoint. All workers must call this method.

        Args:
            shape: values that are saved with the memory, for :meth:`restore` to compare.

        Returns:
            On the first worker, a dictionary with these values, the next segment and tensors (rows of all workers, M,
            C). None on all other workers, and if the memories of the workers differ in length.
        """
        states = [state.detach() for state in self.memory.states]
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            lengths: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(lengths, (self.next_segment, self.memory.length))
            if len(set(lengths)) > 1:
                logger.warning("the memories of the workers differ in length, so the checkpoint does not keep them")
                return None
            states = [_gather_rows(state) for state in states]
            if distributed.get_rank() > 0:
                return None
        return {**shape, "next_segment": self.next_segment, "states": [state.cpu() for state in states]}

    def restore(self, saved: dict[str, Any], shape: Shape, rows: slice) -> None:
        """Restore this worker's rows of a saved memory. If the memory does not fit, warn and start with an empty one.

        Args:
            saved: the result of :meth:`gather`.
            shape: the values that must equal those saved.
            rows: the rows of this worker.
        """
        pairs = {name: (saved.get(name, ""), value) for name, value in shape.items()}
        if odd := [f"{name} {old}, now {new}" for name, (old, new) in pairs.items() if old != new]:
            logger.warning(
                f"the memory in the checkpoint does not fit this run ({'; '.join(odd)}): streams start with an empty "
                "memory"
            )
            self.memory.clear()
            return
        self.memory.states = [state[rows].clone() for state in saved["states"]]
        self.next_segment = saved["next_segment"]
        logger.info("restored a memory of %d tokens per stream from the checkpoint", self.memory.length)


def _gather_rows(state_BMC: Tensor) -> Tensor:
    """Return the rows of all workers on the first worker, and the worker's own rows on all others.

    It is called once per sublayer, because the memories of all sublayers together may not fit on one GPU.
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
    """Return a copy of a batch with the memory among the inputs of the model.

    The batch is copied because fairseq keeps the first one to use it again.
    """
    return {**sample, "net_input": {**sample["net_input"], "memory": memory}}
