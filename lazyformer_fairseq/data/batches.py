"""Splits an epoch's samples into the same batches as fairseq-train, in the same order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Protocol, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lazyformer_fairseq.errors import UserError


def batch_by_size(
    indices: np.ndarray,
    sizes: np.ndarray,
    max_tokens: Optional[int] = None,
    max_sentences: Optional[int] = None,
) -> list[np.ndarray]:
    """Group consecutive samples into batches that are as large as the limits allow.

    Args:
        indices: sample indices in the order to follow, int64 (N,).
        sizes: number of tokens per sample, (N,).
        max_tokens: maximum number of tokens per batch, including padding, so each sample counts as many tokens as the
            longest one.
        max_sentences: maximum number of samples per batch.

    Raises:
        UserError: a sample has more than `max_tokens` tokens.
    """
    most = max_sentences or len(indices)
    if not max_tokens:
        if len(indices):
            return np.split(indices, range(most, len(indices), most))
        return []
    if len(indices) and sizes.max() > max_tokens:
        raise UserError(
            f"a sample has {sizes.max()} tokens, but the limit per batch is {max_tokens}; increase --max-tokens"
        )
    starts = [0]
    longest = 0
    for place, size in enumerate(sizes.tolist()):
        longest = max(longest, size)
        count = place + 1 - starts[-1]
        if count > most or count * longest > max_tokens:
            starts.append(place)
            longest = size
    if len(indices):
        return np.split(indices, starts[1:])
    return []


def pad_right(rows: Sequence[torch.Tensor], pad: int, width: int = 0) -> torch.Tensor:
    """Right-pad rows of different lengths into a tensor (B, T); T is the longest length or, if larger, `width`."""
    batch = pad_sequence(list(rows), batch_first=True, padding_value=pad)
    missing = max(0, width - batch.size(1))
    return torch.nn.functional.pad(batch, (0, missing), value=pad)


class Batched(Protocol):
    """The dataset interface that :class:`EpochBatches` needs.

    Every :class:`~lazyformer_fairseq.data.datasets.labelled_texts.SizedDataset` and every split of masked text
    implements it.
    """

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch."""

    def ordered_indices(self) -> np.ndarray:
        """Return the sample indices in the order in which the epoch reads them."""

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: Optional[int],
        max_sentences: Optional[int],
    ) -> list:
        """Group samples into batches, preserving their order."""

    def collater(self, samples: list) -> dict[str, Any]:
        """Collate samples into a batch."""

    def __getitem__(self, index: int) -> Any: ...


@dataclass(eq=False, repr=False)
class EpochBatches:
    """A resumable iterator over a dataset's batches, the same ones that fairseq-train reads with the same seed.

    Use it like a DataLoader. Each pass yields the remaining batches of an epoch, built by the dataset's collater, and
    the next pass starts the next epoch. :meth:`state_dict` records how many batches have been yielded.

    Args:
        dataset: one of this package's datasets.
        batch_size: maximum number of samples per batch; fairseq's ``--batch-size``.
        max_tokens: maximum number of tokens per batch, including padding; ``--max-tokens``.
        seed: random seed, which together with the epoch determines the order of the batches; ``--seed``.
        shuffle: whether to read the batches in a new random order in each epoch. Set it to False for validation; every
            pass then repeats the first epoch.
        workers: number of worker processes that prefetch batches; ``--num-workers``.
        sample_range: indices of the samples to read; None for all.

    Attributes:
        epoch: epoch of the next pass, from 1.
        done: number of that epoch's batches that all processes together have already yielded.
        shard: rank of this process among the data-parallel processes, from 0.
        shards: number of data-parallel processes; each one reads every `shards`-th batch.
    """

    dataset: Batched
    batch_size: Optional[int] = None
    max_tokens: Optional[int] = None
    seed: int = 1
    shuffle: bool = True
    workers: int = 0
    sample_range: Optional[range] = None

    def __post_init__(self) -> None:
        if not (self.batch_size or self.max_tokens):
            raise UserError("the batch size is missing; set batch_size, max_tokens or both")
        self.shard = 0
        self.shards = 1
        self.epoch = 1
        self.done = 0
        self._batches: tuple[int, list[np.ndarray]] = (0, [])  # an epoch and its batches

    @property
    def indices(self) -> list[np.ndarray]:
        """Sample indices of each batch, int64 (B,), in the epoch's batch order."""
        if self._batches[0] != self.epoch:
            self.dataset.set_epoch(self.epoch)
            order = self.dataset.ordered_indices()
            if self.sample_range is not None:
                is_in_range = (order >= self.sample_range.start) & (order < self.sample_range.stop)
                order = order[is_in_range]
            batches = self.dataset.batch_by_size(order, self.max_tokens, self.batch_size)
            if self.shuffle:  # equals np.random.seed followed by np.random.shuffle, as in fairseq
                np.random.RandomState(self.seed + self.epoch).shuffle(batches)
            self._batches = self.epoch, batches
        return self._batches[1]

    def __len__(self) -> int:
        """Return the number of batches in a full epoch."""
        return len(self.indices)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        remaining = self._batches_of_this_process(self.indices[self.done :])
        rest = [batch.tolist() for batch in remaining]
        loader: DataLoader[dict[str, Any]] = DataLoader(
            cast(Dataset, self.dataset),  # a protocol cannot extend Dataset
            batch_sampler=rest,
            collate_fn=self.dataset.collater,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
        )
        for batch in loader:
            self.done = min(self.done + self._batches_per_step(), len(self))
            yield batch
        while self.done < len(self):  # other processes have one more batch
            self.done = len(self)
            yield {}
        self.epoch = self._next_epoch()
        self.done = 0

    def _batches_of_this_process(self, batches: list[np.ndarray]) -> list[np.ndarray]:
        """Return the remaining batches that this process reads."""
        return batches[self.shard :: self.shards]

    def _batches_per_step(self) -> int:
        """Return the number of batches that all processes together consume per step."""
        return self.shards

    def _next_epoch(self) -> int:
        """Return the next epoch."""
        if self.shuffle:
            return self.epoch + 1
        return self.epoch

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data, as fairseq stores it: the epoch and its number of completed iterations.

        `consumed` counts batches over all processes, so it does not depend on the number of processes.
        """
        if self.done and self.done == len(self):
            return {"epoch": self._next_epoch(), "iterations_in_epoch": 0}
        rounds = -(-self.done // self._batches_per_step())
        return {"epoch": self.epoch, "iterations_in_epoch": rounds, "consumed": self.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the last batch that was yielded; the state may also come from a fairseq checkpoint."""
        self.epoch = state["epoch"]
        self.done = state.get("consumed", state["iterations_in_epoch"])
