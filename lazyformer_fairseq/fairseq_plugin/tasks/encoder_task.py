"""The base of tasks that train a model of ours."""

import logging
from pathlib import Path
from typing import Optional

import numpy as np
from fairseq.data import Dictionary, FairseqDataset
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask

from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.fairseq_plugin.kinds import as_fairseq
from lazyformer_fairseq.fairseq_plugin.reliability.data import BatchSize, ExactEpochBatchIterator

logger = logging.getLogger(__name__)


class EncoderTask(FairseqTask):
    """A task that reads and predicts symbols of one dictionary.

    Attributes:
        dictionary: of inputs and targets alike.
    """

    def __init__(self, cfg: FairseqDataclass, dictionary: Dictionary):
        super().__init__(cfg)
        self.dictionary = as_fairseq(dictionary)

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary

    def get_batch_iterator(
        self,
        dataset: FairseqDataset,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        disable_iterator_cache: bool = False,
        **others,
    ):
        """fairseq's iterator, which can also finish an epoch that began with another batch size."""
        make_iterator = super().get_batch_iterator
        cached = {"disable_iterator_cache": disable_iterator_cache}
        iterator = make_iterator(dataset, max_tokens, max_sentences, **cached, **others)
        if not self.can_reuse_epoch_itr(dataset):  # workers that stay for another epoch would wait in vain
            iterator.persistent_workers = False

        def make(size: BatchSize):
            return make_iterator(dataset, **size, disable_iterator_cache=True, **others).frozen_batches

        def cut(samples: np.ndarray, size: BatchSize):
            return dataset.batch_by_size(samples, **size)

        if isinstance(iterator, ExactEpochBatchIterator):  # as in every run; without one there is nothing to resume
            iterator.tell_batch_size({"max_tokens": max_tokens, "max_sentences": max_sentences}, make, cut)
        return iterator


def dictionary_of(folder: str) -> Dictionary:
    """The dictionary of binarised data; UserError where there is none."""
    path = Path(folder) / "dict.txt"
    dictionary = load_dictionary(path)
    logger.info("dictionary: %d symbols from %s", len(dictionary), path)
    return dictionary
