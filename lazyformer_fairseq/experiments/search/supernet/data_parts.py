"""The training data in two disjoint parts: one for the weights, one for the architecture."""

from collections.abc import Iterator
from typing import Any, Union

import numpy as np
import torch
from fairseq import utils

from lazyformer_fairseq.data.datasets.sized import SizedDataset
from lazyformer_fairseq.data.datasets.token_streams import TokenStreams
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.tasks.stream_language_modeling import check_memory_fits
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory


class BlocksPart:
    """Some blocks of a dataset, read in a different order each epoch; the same from any start.

    Args:
        first, last: the part holds the blocks from `first` up to, not including, `last`.
    """

    def __init__(self, dataset: SizedDataset, first: int, last: int, batch_size: int):
        self.dataset = dataset
        self.first = first
        self.last = last
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-(self.last - self.first) // self.batch_size)

    def batches(self, epoch: int, start: int) -> Iterator[dict[str, Any]]:
        """An epoch's batches from number `start` on."""
        self.dataset.set_epoch(epoch)
        order = np.asarray(self.dataset.ordered_indices())
        own = order[(order >= self.first) & (order < self.last)]
        for at in range(start * self.batch_size, len(own), self.batch_size):
            yield self.dataset.collater([self.dataset[int(index)] for index in own[at : at + self.batch_size]])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class StreamsPart:
    """Streams of contiguous text, with their memory.

    Each epoch starts at their beginning, with an empty memory.

    Raises:
        UserError: the streams are shorter than a segment and the memory.
    """

    def __init__(self, streams: TokenStreams, mem_len: int):
        check_memory_fits(mem_len, streams)
        self.streams = streams
        self.memory = StreamMemory()

    def __len__(self) -> int:
        return len(self.streams)

    def batches(self, epoch: int, start: int) -> Iterator[dict[str, Any]]:
        """Batches from segment `start` on; clears the memory at 0."""
        for segment in range(start, len(self.streams)):
            if segment == 0:
                self.memory.clear()
            batch = dict(self.streams[segment])
            batch["net_input"] = {**batch["net_input"], "memory": self.memory}
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state)


Part = Union[BlocksPart, StreamsPart]


def two_parts_of_blocks(dataset: SizedDataset, architecture_share: float, batch_size: int) -> tuple[Part, Part]:
    """(for the weights, for the architecture): the last blocks, which hold other documents, are the architecture's.

    Raises:
        UserError: a part would be empty.
    """
    border = _border(len(dataset), architecture_share, "blocks")
    return BlocksPart(dataset, 0, border, batch_size), BlocksPart(dataset, border, len(dataset), batch_size)


def two_parts_of_text(
    tokens: np.ndarray, architecture_share: float, batch_size: int, tgt_len: int, mem_len: int, eos: int, pad: int
) -> tuple[Part, Part]:
    """As :func:`two_parts_of_blocks`, for one long text."""
    border = _border(len(tokens), architecture_share, "tokens")
    weights, architecture = (
        TokenStreams(part, batch_size, tgt_len, eos, pad) for part in (tokens[:border], tokens[border:])
    )
    return StreamsPart(weights, mem_len), StreamsPart(architecture, mem_len)


def _border(count: int, architecture_share: float, what: str) -> int:
    border = count - round(count * architecture_share)
    if not 0 < border < count:
        raise UserError(
            f"the training data's {count} {what} make no second part for the architecture at --architecture-share "
            f"{architecture_share:g}; give more text or another share"
        )
    return border


def move_to(batch: dict[str, Any], device: Union[str, torch.device]) -> dict[str, Any]:
    return utils.apply_to_sample(lambda tensor: tensor.to(device), batch)
