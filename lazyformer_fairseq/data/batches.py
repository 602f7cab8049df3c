"""The batches of an epoch: what is in each, and in which order they come; the same as fairseq-train's, by index."""

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
    """Cut an order of samples into batches, each as large as may be; padding counts as tokens.

    Args:
        indices: the samples in their order, int64 (N,).
        sizes: tokens of each of them, (N,).
        max_tokens: most tokens of a batch, counted as its samples times the longest of them.
        max_sentences: samples of a batch.

    Raises:
        UserError: a sample has more tokens than a batch may.
    """
    most = max_sentences or len(indices)
    if not max_tokens:
        if len(indices):
            return np.split(indices, range(most, len(indices), most))
        return []
    if len(indices) and sizes.max() > max_tokens:
        raise UserError(f"a sample has {sizes.max()} tokens, and a batch {max_tokens} at most (--max-tokens)")
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
    """Return rows (T,) of different lengths as one tensor (B, T); T is the longest, or `width` if that is more."""
    batch = pad_sequence(list(rows), batch_first=True, padding_value=pad)
    return torch.nn.functional.pad(batch, (0, max(0, width - batch.size(1))), value=pad)


class Batched(Protocol):
    """The methods of a dataset that :class:`EpochBatches` calls.

    Every :class:`~lazyformer_fairseq.data.datasets.labelled_texts.SizedDataset` has them, and a split of masked text.
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
        """Divide an order of samples into batches."""

    def collater(self, samples: list) -> dict[str, Any]:
        """Return samples as a batch."""

    def __getitem__(self, index: int) -> Any: ...


@dataclass(eq=False, repr=False)
class EpochBatches:
    """A dataset's batches, epoch after epoch, as fairseq-train reads them with the same seed in one process.

    A pass over it yields the rest of an epoch, batches as the dataset's collater makes them; the next pass is the next
    epoch. It stands where a DataLoader would, and keeps its place: :meth:`state_dict` counts what was yielded.

    Args:
        dataset: one of this package.
        batch_size: most samples of a batch; fairseq's ``--batch-size``.
        max_tokens: most tokens of a batch, padding counted; ``--max-tokens``.
        seed: ``--seed``; it and the epoch decide the order of the batches.
        shuffle: whether batches come in random order, another in each epoch. In validation they do not, and each pass
            is the first epoch.
        workers: processes that read ahead; ``--num-workers``.
        part: numbers of the samples that are read; None for all.

    Attributes:
        epoch: the epoch of the next pass, from 1.
        done: batches of it that were yielded, by all processes together.
        shard: this process among those that share each update, from 0.
        shards: processes; each is dealt every `shards`-th batch.
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
            raise UserError("how large is a batch? Give batch_size, or max_tokens, or both")
        self.shard = 0
        self.shards = 1
        self.epoch = 1
        self.done = 0
        self._batches: tuple[int, list[np.ndarray]] = (0, [])  # of which epoch

    @property
    def indices(self) -> list[np.ndarray]:
        """Numbers of the samples of each batch of the epoch, int64 (B,), in the order in which they are yielded."""
        if self._batches[0] != self.epoch:
            self.dataset.set_epoch(self.epoch)
            order = self.dataset.ordered_indices()
            if self.part is not None:
                order = order[(order >= self.part.start) & (order < self.part.stop)]
            batches = self.dataset.batch_by_size(order, self.max_tokens, self.batch_size)
            if self.shuffle:  # as np.random.shuffle after np.random.seed, which fairseq calls
                np.random.RandomState(self.seed + self.epoch).shuffle(batches)
            self._batches = self.epoch, batches
        return self._batches[1]

    def __len__(self) -> int:
        """Batches of the whole epoch."""
        return len(self.indices)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rest = [batch.tolist() for batch in self._dealt(self.indices[self.done :])]
        loader: DataLoader[dict[str, Any]] = DataLoader(
            cast(Dataset, self.dataset),  # which a protocol cannot say
            batch_sampler=rest,
            collate_fn=self.dataset.collater,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
        )
        for batch in loader:
            self.done = min(self.done + self._consumed(), len(self))
            yield batch
        while self.done < len(self):  # the other processes have one more
            self.done = len(self)
            yield {}
        self.epoch = self._after()
        self.done = 0

    def _dealt(self, batches: list[np.ndarray]) -> list[np.ndarray]:
        """Return those of the rest of the epoch that this process reads."""
        return batches[self.shard :: self.shards]

    def _consumed(self) -> int:
        """Return how many batches all processes read together when each reads one."""
        return self.shards

    def _after(self) -> int:
        """Return the next epoch."""
        if self.shuffle:
            return self.epoch + 1
        return self.epoch

    def state_dict(self) -> dict[str, int]:
        """Return where it is, in fairseq's words: the epoch, and how many rounds of its batches were yielded.

        `consumed` counts batches, whatever the number of processes.
        """
        if self.done and self.done == len(self):
            return {"epoch": self._after(), "iterations_in_epoch": 0}
        rounds = -(-self.done // self._consumed())
        return {"epoch": self.epoch, "iterations_in_epoch": rounds, "consumed": self.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the last batch that was yielded; also takes the state that a fairseq checkpoint has."""
        self.epoch = state["epoch"]
        self.done = state.get("consumed", state["iterations_in_epoch"])
