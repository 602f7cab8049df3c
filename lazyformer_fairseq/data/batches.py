"""The batches of an epoch: the samples of each and the order of the batches, which are the same as in fairseq-train."""

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
    """Divide samples, in the given order, into batches that are as large as the limits allow.

    Args:
        indices: numbers of the samples in their order, int64 (N,).
        sizes: tokens of each sample, (N,).
        max_tokens: largest number of tokens in a batch, padding included: its samples times the longest one's tokens.
        max_sentences: largest number of samples in a batch.

    Raises:
        UserError: a sample has more than `max_tokens` tokens.
    """
    most = max_sentences or len(indices)
    if not max_tokens:
        if len(indices):
            return np.split(indices, range(most, len(indices), most))
        return []
    if len(indices) and sizes.max() > max_tokens:
        raise UserError(f"a sample has {sizes.max()} tokens, but a batch at most {max_tokens}; raise --max-tokens")
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
    """Pad rows (T,) of different lengths on the right to a tensor (B, T); T is the longest, or `width` if larger."""
    batch = pad_sequence(list(rows), batch_first=True, padding_value=pad)
    return torch.nn.functional.pad(batch, (0, max(0, width - batch.size(1))), value=pad)


class Batched(Protocol):
    """The methods of a dataset that :class:`EpochBatches` calls.

    Every :class:`~lazyformer_fairseq.data.datasets.labelled_texts.SizedDataset` and every split of masked text has
    them.
    """

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""

    def ordered_indices(self) -> np.ndarray:
        """Return the order of the samples."""

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: Optional[int],
        max_sentences: Optional[int],
    ) -> list:
        """Divide samples, in the given order, into batches."""

    def collater(self, samples: list) -> dict[str, Any]:
        """Collate samples into a batch."""

    def __getitem__(self, index: int) -> Any: ...


@dataclass(eq=False, repr=False)
class EpochBatches:
    """A dataset's batches, epoch after epoch, as fairseq-train reads them with the same seed in one process.

    A pass over the object yields the rest of an epoch, in batches that the dataset's collater makes; the next pass
    yields the next epoch. It is used like a DataLoader and keeps its place: :meth:`state_dict` counts the batches that
    were yielded.

    Args:
        dataset: a dataset of this package.
        batch_size: largest number of samples in a batch; fairseq's ``--batch-size``.
        max_tokens: largest number of tokens in a batch, padding included; ``--max-tokens``.
        seed: together with the epoch, it determines the order of the batches; ``--seed``.
        shuffle: whether batches come in a random order, which changes in each epoch. In validation they do not, and
            each pass is the first epoch.
        workers: number of processes that read ahead; ``--num-workers``.
        part: numbers of the samples to read; None for all.

    Attributes:
        epoch: the epoch of the next pass, from 1.
        done: batches of that epoch that were yielded, by all processes together.
        shard: number of this process among those that share each update, from 0.
        shards: number of these processes; each of them reads every `shards`-th batch.
    """

    dataset: Batched
    batch_size: Optional[int] = None
    max_tokens: Optional[int] = None
    seed: int = 1
    shuffle: bool = True
    workers: int = 0
    part: Optional[range] = None

    def __post_init__(self) -> None:
        if not (self.batch_size or self.max_tokens):
            raise UserError("the size of a batch is missing; give batch_size, max_tokens or both")
        self.shard = 0
        self.shards = 1
        self.epoch = 1
        self.done = 0
        self._batches: tuple[int, list[np.ndarray]] = (0, [])  # an epoch and its batches

    @property
    def indices(self) -> list[np.ndarray]:
        """The numbers of the samples of each batch, int64 (B,), in the order in which the epoch yields the batches."""
        if self._batches[0] != self.epoch:
            self.dataset.set_epoch(self.epoch)
            order = self.dataset.ordered_indices()
            if self.part is not None:
                order = order[(order >= self.part.start) & (order < self.part.stop)]
            batches = self.dataset.batch_by_size(order, self.max_tokens, self.batch_size)
            if self.shuffle:  # like np.random.shuffle after np.random.seed, which fairseq calls
                np.random.RandomState(self.seed + self.epoch).shuffle(batches)
            self._batches = self.epoch, batches
        return self._batches[1]

    def __len__(self) -> int:
        """Return the number of batches in the whole epoch."""
        return len(self.indices)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rest = [batch.tolist() for batch in self._dealt(self.indices[self.done :])]
        loader: DataLoader[dict[str, Any]] = DataLoader(
            cast(Dataset, self.dataset),  # a protocol cannot extend Dataset
            batch_sampler=rest,
            collate_fn=self.dataset.collater,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
        )
        for batch in loader:
            self.done = min(self.done + self._consumed(), len(self))
            yield batch
        while self.done < len(self):  # other processes have one more batch
            self.done = len(self)
            yield {}
        self.epoch = self._after()
        self.done = 0

    def _dealt(self, batches: list[np.ndarray]) -> list[np.ndarray]:
        """Return those of the remaining batches that this process reads."""
        return batches[self.shard :: self.shards]

    def _consumed(self) -> int:
        """Return the number of batches that all processes read together when each reads one."""
        return self.shards

    def _after(self) -> int:
        """Return the next epoch."""
        if self.shuffle:
            return self.epoch + 1
        return self.epoch

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data as fairseq names it: the epoch, and the iterations that were done in it.

        `consumed` counts batches, whatever the number of processes.
        """
        if self.done and self.done == len(self):
            return {"epoch": self._after(), "iterations_in_epoch": 0}
        rounds = -(-self.done // self._consumed())
        return {"epoch": self.epoch, "iterations_in_epoch": rounds, "consumed": self.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch that was yielded; the state may also come from a fairseq checkpoint."""
        self.epoch = state["epoch"]
        self.done = state.get("consumed", state["iterations_in_epoch"])
