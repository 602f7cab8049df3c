"""A run's place in an epoch of its data.

A run resumes with exactly the samples it has not seen. fairseq deals the shuffled batches of an epoch to its processes
in turn and saves how many rounds are done. That is the place in the order as long as the number of processes and the
batches stay the same. Here the state also records how the batches were made and how many of them all processes together
have consumed. Another number of processes is dealt the rest of the same order; for another batch size (in sentences or
tokens) the rest is cut anew, its samples in the same order. Masks depend on a sample and the epoch alone, so they stay
as they would have been.
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
BatchSize = dict[str, Optional[int]]  # fairseq's max_tokens and max_sentences


class ExactEpochBatchIterator(EpochBatchIterator):
    """fairseq's iterator, with a state for other numbers of processes, and other batch sizes if the task helps.

    Attributes:
        batch_size: what the batches were made with; None where the task did not tell.
        pieces: of the epoch that was resumed, how batches were made and how many were consumed: one piece, and another
            for each time that the batch size changed within the epoch. Empty in an epoch from its start.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batch_size: Optional[BatchSize] = None
        self.pieces: list[dict[str, Any]] = []
        self._rest: Optional[Batches] = None
        self._start = 0  # rounds that stand for what was consumed before the epoch was resumed

    def tell_batch_size(self, size: BatchSize, make: Callable[[BatchSize], Batches], cut: Callable) -> None:
        """Learn from the task how batches are made.

        Args:
            size: the size of the batches.
            make: makes batches of all samples, of a size.
            cut: makes batches of some samples, in their order, of a size.
        """
        self.batch_size = size
        self._make = make
        self._cut = cut

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch, how batches are made and how many are consumed."""
        state = super().state_dict()
        if state["iterations_in_epoch"]:
            rounds = state["iterations_in_epoch"] - self._start
            piece = self.pieces[-1] if self.pieces else self._new_piece()
            last = {**piece, "consumed": piece["consumed"] + rounds * self.num_shards}
            state.update(pieces=[*self.pieces[:-1], last], samples=self._samples())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state, also of another number of processes or batch size. With other data the epoch starts anew.

        Raises:
            UserError: the state is of no place in this data.
        """
        try:
            self._load(state)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"the checkpoint's place in epoch {state['epoch']} is not one of this data ({first_line(error)}): give "
                "--reset-dataloader to begin with the first epoch, or copy an older checkpoint over checkpoint_last.pt"
            ) from error

    def _load(self, state: dict[str, Any]) -> None:
        if not state.get("pieces") or self._supports_prefetch:
            super().load_state_dict(state)
            return
        if state["samples"] != self._samples():
            logger.warning(
                "the checkpoint is from the midst of an epoch of %d samples, and now there are %d (other data, or "
                "other --tokens-per-sample): the epoch starts anew, so some samples come twice",
                *(state["samples"], self._samples()),
            )
            super().load_state_dict({**state, "iterations_in_epoch": 0})
            return
        self.pieces = [dict(piece) for piece in state["pieces"]]
        if None not in (self.batch_size, before := self.pieces[-1]["batch_size"]) and self.batch_size != before:
            logger.info("batch size %s, before %s: the rest of the epoch is cut anew", self.batch_size, self.pieces[-1])
            self.pieces.append(self._new_piece())
        self._rest = self._what_is_left(state["epoch"], state["shuffle"])
        self._start = max(1, len(self) - math.ceil(len(self._rest) / self.num_shards))
        super().load_state_dict({**state, "iterations_in_epoch": self._start})

    def next_epoch_itr(self, *args, **kwargs):
        """Return the batches of the epoch that begins or is resumed."""
        if self._next_epoch_itr is None:  # an epoch from its start
            self.pieces = []
            self._rest = None
            self._start = 0
        return super().next_epoch_itr(*args, **kwargs)

    def ordered_batches(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> Batches:
        """Return this process's batches; where an epoch is resumed, those that are left, behind empty ones."""
        if self._rest is None:
            return super().ordered_batches(epoch, fix_batches_to_gpus, shuffle)
        mine = ShardedIterator(self._rest, self.num_shards, self.shard_id, fill_value=[])
        return [[]] * self._start + list(mine)  # fairseq skips the first ones

    def _new_piece(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "shards": self.num_shards, "consumed": 0}

    def _samples(self) -> int:
        return sum(map(len, self.frozen_batches))

    def _what_is_left(self, epoch: int, shuffle: bool) -> Batches:
        """Return the rest of the epoch's batches, in the order in which all processes together consume them."""
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
        """Return batches as fairseq deals them to `shards` processes, whose number matters with grouped shuffling."""
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
        return [batch for batches_of_round in zip(*dealt, strict=True) for batch in batches_of_round if len(batch)]


class ExactGroupedIterator(GroupedIterator):
    """fairseq's groups of ``--update-freq`` batches, all of them.

    fairseq counts them from the epoch's start, and leaves out the last one where an epoch is resumed at a batch that is
    no multiple of the update-freq, as it can be when that has changed.
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
            iterable.take(position + groups * chunk_size)  # else the epoch would not end
