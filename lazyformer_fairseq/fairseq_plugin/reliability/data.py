"""Resuming in the middle of an epoch with exactly the samples that the run has not seen yet.

fairseq distributes an epoch's shuffled batches round-robin over its processes and saves the number of rounds. This
number is a valid position only while the number of processes and the batches stay the same. Here the state also records
how the batches were made and how many of them all processes together have consumed. If the number of processes has
changed, the remaining batches are distributed over the new processes in the same order. If the batch size (in sentences
or tokens) has changed, the remaining samples are divided into new batches in the same order. Masks depend only on the
sample and the epoch, so they do not change.
"""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator, ShardedIterator

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.checkpoint_file import first_line

logger = logging.getLogger(__name__)


Batches = Sequence[Sequence[int]]
BatchSize = dict[str, Optional[int]]  # keys: max_tokens and max_sentences, as in fairseq
OPTIONS = {"max_tokens": "--max-tokens", "max_sentences": "--batch-size"}


class ExactEpochBatchIterator(EpochBatchIterator):
    """fairseq's iterator, extended to resume with a different number of processes or batch size.

    To resume with a different batch size, the task must have called :meth:`set_batching`.

    Attributes:
        batch_size: the batch size; None if the task has not set it.
        pieces: the history of a resumed epoch, one entry per batch size: how the batches were made and how many of them
            were consumed. Empty if the epoch was not resumed.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batch_size: Optional[BatchSize] = None
        self.pieces: list[dict[str, Any]] = []
        self._rest: Optional[Batches] = None
        self._start = 0  # number of rounds that stand for the batches consumed before resuming

    def set_batching(self, size: BatchSize, make: Callable[[BatchSize], Batches], cut: Callable) -> None:
        """Set how the task makes batches.

        Args:
            size: the current batch size.
            make: returns batches of all samples for a given batch size.
            cut: returns batches of the given samples, in the same order, for a given batch size.
        """
        self.batch_size = size
        self._make = make
        self._cut = cut

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, how its batches are made, and how many have been consumed."""
        state = super().state_dict()
        if state["iterations_in_epoch"]:
            rounds = state["iterations_in_epoch"] - self._start
            piece = self.pieces[-1] if self.pieces else self._new_piece()
            last = {**piece, "consumed": piece["consumed"] + rounds * self.num_shards}
            state.update(pieces=[*self.pieces[:-1], last], samples=self._samples())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, even if the number of processes or batch size differs; if the data differs, restart the epoch.

        Raises:
            UserError: the state does not describe a position in this data.
        """
        try:
            self._load(state)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"the checkpoint's position in epoch {state['epoch']} does not exist in this data "
                f"({first_line(error)}): use --reset-dataloader to start over with the first epoch, or copy an older "
                "checkpoint over checkpoint_last.pt"
            ) from error

    def _load(self, state: dict[str, Any]) -> None:
        if not state.get("pieces") or self._supports_prefetch:
            super().load_state_dict(state)
            return
        if state["samples"] != self._samples():
            logger.warning(
                "the checkpoint is from the middle of an epoch of %d samples, but now there are %d (different data or "
                "--tokens-per-sample): the epoch restarts, so some samples are read twice",
                state["samples"],
                self._samples(),
            )
            super().load_state_dict({**state, "iterations_in_epoch": 0})
            return
        self.pieces = [dict(piece) for piece in state["pieces"]]
        before = self.pieces[-1]["batch_size"]
        are_known = self.batch_size is not None and before is not None
        if are_known and self.batch_size != before:
            logger.info(
                "the batch size changed from %s to %s: the rest of the epoch is divided into new batches",
                _as_options(before),
                _as_options(self.batch_size),
            )
            self.pieces.append(self._new_piece())
        self._rest = self._what_is_left(state["epoch"], state["shuffle"])
        rounds_left = math.ceil(len(self._rest) / self.num_shards)
        self._start = max(1, len(self) - rounds_left)
        super().load_state_dict({**state, "iterations_in_epoch": self._start})

    def next_epoch_itr(self, *args, **kwargs):
        """Return the iterator over the batches of the new or resumed epoch."""
        if self._next_epoch_itr is None:  # this epoch was not resumed
            self.pieces = []
            self._rest = None
            self._start = 0
        return super().next_epoch_itr(*args, **kwargs)

    def ordered_batches(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> Batches:
        """Return this process's batches; in a resumed epoch, empty batches followed by the remaining ones."""
        if self._rest is None:
            return super().ordered_batches(epoch, fix_batches_to_gpus, shuffle)
        mine = ShardedIterator(self._rest, self.num_shards, self.shard_id, fill_value=[])
        return [[]] * self._start + list(mine)  # fairseq skips the empty ones

    def _new_piece(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "shards": self.num_shards, "consumed": 0}

    def _samples(self) -> int:
        return sum(map(len, self.frozen_batches))

    def _what_is_left(self, epoch: int, shuffle: bool) -> Batches:
        """Return the epoch's remaining batches in the order in which all processes together consume them."""
        first, *others = self.pieces
        if first["batch_size"] in (self.batch_size, None):
            batches = self.frozen_batches
        else:
            batches = tuple(self._make(first["batch_size"]))
        left = self._whole_order(batches, first["shards"], epoch, shuffle)[first["consumed"] :]
        for piece in others:
            samples = np.array(list(itertools.chain.from_iterable(left)))
            left = self._cut(samples, piece["batch_size"])[piece["consumed"] :]
        return left

    def _whole_order(self, batches: Batches, shards: int, epoch: int, shuffle: bool) -> list[Sequence[int]]:
        """Return batches in the order in which `shards` processes together consume them.

        The order depends on the number of processes only with grouped shuffling.
        """
        before = self._frozen_batches, self.num_shards, self.shard_id
        if not self.grouped_shuffling:
            shards = 1
        try:
            dealt = []
            for shard in range(shards):
                self._frozen_batches = batches
                self.num_shards = shards
                self.shard_id = shard
                dealt.append(super().ordered_batches(epoch, False, shuffle))
        finally:
            self._frozen_batches, self.num_shards, self.shard_id = before
        in_order = itertools.chain.from_iterable(zip(*dealt, strict=True))
        return [batch for batch in in_order if len(batch)]


class ExactGroupedIterator(GroupedIterator):
    """fairseq's iterator over groups of ``--update-freq`` batches, fixed to never lose the last group.

    fairseq counts groups from the start of the epoch. It drops the last group if an epoch is resumed at a batch number
    that is not a multiple of ``--update-freq``, as can happen when the option has changed.
    """

    def __init__(self, iterable, chunk_size: int, skip_remainder_batch: bool = False):
        position = getattr(iterable, "n", 0)
        left = len(iterable) - position
        super().__init__(iterable, chunk_size)
        if skip_remainder_batch:
            groups = left // chunk_size
        else:
            groups = math.ceil(left / chunk_size)
        self.total = self.n + groups
        if skip_remainder_batch:
            iterable.take(position + groups * chunk_size)  # otherwise the epoch would not end


def _as_options(size: BatchSize) -> str:
    """Return a batch size as the user would write it, for example ``--batch-size 8``."""
    return " ".join(f"{option} {size[name]}" for name, option in OPTIONS.items() if size[name] is not None)
