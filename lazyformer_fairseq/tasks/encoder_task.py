"""The base of tasks that train an encoder."""

from typing import Optional

import numpy as np
from fairseq.data import Dictionary, FairseqDataset
from fairseq.tasks import FairseqTask

from lazyformer_fairseq.reliability.resume.data_order import ExactEpochBatchIterator


class EncoderTask(FairseqTask):
    """A task that reads and predicts symbols of one dictionary.

    Attributes:
        dictionary: of inputs and targets alike.
    """

    dictionary: Dictionary

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
        iterator = make_iterator(
            dataset, max_tokens, max_sentences, disable_iterator_cache=disable_iterator_cache, **others
        )

        if not self.can_reuse_epoch_itr(dataset):  # workers that stay for another epoch would wait in vain
            iterator.persistent_workers = False

        def make(size: dict[str, Optional[int]]):
            return make_iterator(dataset, **size, disable_iterator_cache=True, **others).frozen_batches

        def cut(samples: np.ndarray, size: dict[str, Optional[int]]):
            return dataset.batch_by_size(samples, **size)

        if isinstance(iterator, ExactEpochBatchIterator):  # as in every run; without one there is nothing to resume
            iterator.tell_batch_size({"max_tokens": max_tokens, "max_sentences": max_sentences}, make, cut)
        return iterator
