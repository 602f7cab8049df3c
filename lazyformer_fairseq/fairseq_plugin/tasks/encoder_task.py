"""The base class of the fairseq tasks that train this package's models."""

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
    """A task whose inputs and targets share one dictionary.

    Attributes:
        dictionary: the dictionary of inputs and targets.
        after_validation: a callback that receives a held-out split's metrics after each validation; set by the trainer.
    """

    after_validation: Optional[Callable[[Mapping[str, Any]], None]] = None

    def __init__(self, cfg: FairseqDataclass, dictionary: Dictionary):
        super().__init__(cfg)
        self.dictionary = as_fairseq(dictionary)

    @property
    def source_dictionary(self) -> Dictionary:
        """The inputs' dictionary."""
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        """The targets' dictionary."""
        return self.dictionary

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """Build the model.

        Raises:
            UserError: the model does not fit in memory.
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
        """Return fairseq's batch iterator, extended to finish an epoch that was begun with a different batch size.

        Args:
            dataset: the dataset to read.
            max_tokens: the largest number of tokens in a batch.
            max_sentences: the largest number of sequences in a batch.
            disable_iterator_cache: whether to build a new iterator for each epoch.
            others: further arguments of fairseq's method.
        """
        make_iterator = super().get_batch_iterator
        iterator = make_iterator(
            dataset,
            max_tokens,
            max_sentences,
            disable_iterator_cache=disable_iterator_cache,
            **others,
        )
        if not self.can_reuse_epoch_itr(dataset):  # the workers would wait forever for another epoch
            iterator.persistent_workers = False

        def make(size: BatchSize):
            return make_iterator(dataset, **size, disable_iterator_cache=True, **others).frozen_batches

        def cut(samples: np.ndarray, size: BatchSize):
            return dataset.batch_by_size(samples, **size)

        if isinstance(iterator, ExactEpochBatchIterator):  # always true in a run; only runs resume
            iterator.set_batching({"max_tokens": max_tokens, "max_sentences": max_sentences}, make, cut)
        return iterator

    def post_validate(self, model: Any, stats: Mapping[str, Any], agg: Any) -> None:
        """Pass a held-out split's metrics to :attr:`after_validation`; fairseq calls this after validating."""
        if self.after_validation is not None:
            self.after_validation(stats)

    # Hooks that SafeTrainer calls for tasks that carry memory from batch to batch.

    def keep_memory(self) -> Optional[Callable[[], None]]:
        """Return a function that restores the current memory if the next update is abandoned."""

    def gather_memory(self) -> None:
        """Gather all processes' memories on the process that writes checkpoints; every process must call this."""

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Return the state that fairseq adds to a checkpoint's extra state."""
        return {}

    def take_from_checkpoint(self, extra_state: Mapping[str, Any]) -> None:
        """Restore the memory from a checkpoint's extra state."""

    def forget_memory(self) -> None:
        """Clear the memory after an update that was skipped or undone."""


def dictionary_of(folder: str) -> Dictionary:
    """Load the dictionary from a folder of binarized data; raise a UserError if there is none."""
    path = Path(folder) / "dict.txt"
    dictionary = load_dictionary(path)
    logger.info("dictionary: %d symbols from %s", len(dictionary), path)
    return dictionary
