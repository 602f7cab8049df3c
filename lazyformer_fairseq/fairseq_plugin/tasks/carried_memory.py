"""The memory of one split's streams, and how far in the text it has come."""

import logging
from dataclasses import asdict, dataclass
from typing import Any, Optional

import torch
import torch.distributed
from torch import Tensor

from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamsShape:
    """What must be equal for a memory to fit: tokens of the text, rows of all workers, tokens of segment and memory.

    And how epochs cut the streams; older checkpoints do not name it.
    """

    tokens: int
    rows: int
    tgt_len: int
    mem_len: int
    cut: str = ""


class CarriedMemory:
    """Follows streams from segment to segment. After a jump in the text it starts empty, never with a wrong past.

    Attributes:
        memory: of the segments before `next_segment`.
        next_segment: the segment that reads the memory.
    """

    def __init__(self) -> None:
        self.memory = StreamMemory()
        self.next_segment = 0

    def forget(self) -> None:
        """Empties the memory: the streams continue without a past."""
        self.memory.clear()

    def before(self, segment: int) -> StreamMemory:
        """The memory to read `segment` with: empty at the start of the text (each epoch's) and after a jump."""
        if segment != self.next_segment and segment and self.memory.length:
            logger.warning(
                "the data continues at segment %d, but the memory ends before %d: streams start with empty memory",
                segment,
                self.next_segment,
            )
        if segment != self.next_segment or segment == 0:
            self.memory.clear()
        return self.memory

    def has_read(self, segment: int) -> None:
        """Records that the memory holds `segment` too. Numbers that are not finite become 0, for they would spread."""
        self.memory.states = [torch.nan_to_num(state, 0.0, 0.0, 0.0) for state in self.memory.states]
        self.next_segment = segment + 1

    def gather(self, shape: StreamsShape) -> Optional[dict[str, Any]]:
        """Returns what a checkpoint keeps: numbers and tensors (rows of all workers, M, C). All workers must call it.

        Returns:
            None on all workers but the first, and where the workers' memories differ in length.
        """
        states = [state.detach() for state in self.memory.states]
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            lengths: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(lengths, (self.next_segment, self.memory.length))
            if len(set(lengths)) > 1:
                logger.warning("the workers' memories are of different length, so the checkpoint keeps none")
                return None
            states = [_gather_rows(state) for state in states]
            if torch.distributed.get_rank() > 0:
                return None
        return {**asdict(shape), "next_segment": self.next_segment, "states": [state.cpu() for state in states]}

    def restore(self, saved: dict[str, Any], shape: StreamsShape, rows: slice) -> None:
        """Takes this worker's `rows` of what :meth:`gather` gave; if that does not fit, warns and stays empty."""
        differences = [
            f"{name} {saved.get(name, '')}, now {value}"
            for name, value in asdict(shape).items()
            if saved.get(name, "") != value
        ]
        if differences:
            logger.warning(
                "the checkpoint's memory does not fit (%s): streams start with empty memory", "; ".join(differences)
            )
            self.forget()
            return
        self.memory.load_state_dict({"states": [state[rows].clone() for state in saved["states"]]})
        self.next_segment = saved["next_segment"]
        logger.info("restored a memory of %d tokens a stream from the checkpoint", self.memory.length)


def _gather_rows(state_BMC: Tensor) -> Tensor:
    """On the first worker the rows of all workers, elsewhere its own. Once a sublayer: all may not fit a GPU."""
    world, first = torch.distributed.get_world_size(), torch.distributed.get_rank() == 0
    parts = [torch.empty_like(state_BMC) for _ in range(world)] if first else None
    torch.distributed.gather(state_BMC.contiguous(), parts, dst=0)
    return torch.cat(parts).cpu() if first else state_BMC
