"""The base of tasks that train a model of ours."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

import numpy as np
from fairseq.data import Dictionary, FairseqDataset
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask

from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.fairseq_plugin.fairseq_classes import as_fairseq
from lazyformer_fairseq.fairseq_plugin.reliability.data import BatchSize, ExactEpochBatchIterator
from lazyformer_fairseq.training.out_of_memory import build_in_memory

logger = logging.getLogger(__name__)


class EncoderTask(FairseqTask):
    """A task that reads and predicts symbols of one dictionary.

    Attributes:
        dictionary: the symbols of inputs and targets alike.
        after_validation: called with the scores of a held-out split, if a trainer sets it.
    """

    after_validation: Optional[Callable[[Mapping[str, Any]], None]] = None

    def __init__(self, cfg: FairseqDataclass, dictionary: Dictionary):
        super().__init__(cfg)
        self.dictionary = as_fairseq(dictionary)

    @property
    def source_dictionary(self) -> Dictionary:
        """Return the dictionary of inputs."""
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        """Return the dictionary of targets."""
        return self.dictionary

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """Build the model.

        Raises:
            UserError: it does not fit in memory.
        """
        make = super().build_model
        return build_in_memory(lambda: make(cfg, from_checkpoint))

    def get_batch_iterator(
        self,
        dataset: FairseqDataset,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        disable_iterator_cache: bool = False,
        **others,
    ):
        """Return fairseq's iterator, which can also finish an epoch that began with another batch size."""
        make_iterator = super().get_batch_iterator
        iterator = make_iterator(
            dataset,
            max_tokens,
            max_sentences,
            disable_iterator_cache=disable_iterator_cache,
            **others,
        )
        if not self.can_reuse_epoch_itr(dataset):  # workers that stay for another epoch would wait in vain
            iterator.persistent_workers = False

        def make(size: BatchSize):
            return make_iterator(dataset, **size, disable_iterator_cache=True, **others).frozen_batches

        def cut(samples: np.ndarray, size: BatchSize):
            return dataset.batch_by_size(samples, **size)

        if isinstance(iterator, ExactEpochBatchIterator):  # as in every run; without one there is nothing to resume
            iterator.tell_batch_size({"max_tokens": max_tokens, "max_sentences": max_sentences}, make, cut)
        return iterator

    def post_validate(self, model: Any, stats: Mapping[str, Any], agg: Any) -> None:
        """Hand the scores of a held-out split on, as fairseq does after each validation."""
        if self.after_validation is not None:
            self.after_validation(stats)

    # Hooks of SafeTrainer, for what a task carries from batch to batch.

    def keep_memory(self) -> Optional[Callable[[], None]]:
        """Return what brings the memory of now back, where the update that follows is given up."""

    def gather_memory(self) -> None:
        """Gather the memories of all processes on the one that writes checkpoints; all processes call it."""

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Return what fairseq adds to a checkpoint's extra state."""
        return {}

    def take_from_checkpoint(self, extra_state: Mapping[str, Any]) -> None:
        """Restore the memory from a checkpoint's extra state."""

    def forget_memory(self) -> None:
        """Drop what an update that was skipped or undone left in the memory."""


def dictionary_of(folder: str) -> Dictionary:
    """Load the dictionary of binarised data; raise a UserError where there is none."""
    path = Path(folder) / "dict.txt"
    dictionary = load_dictionary(path)
    logger.info("dictionary: %d symbols from %s", len(dictionary), path)
    return dictionary
