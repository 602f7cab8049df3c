"""Word tagging, as in named-entity recognition and part-of-speech tagging."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from lazyformer_fairseq.data.datasets.tagged_words import TaggedWordsDataset
from lazyformer_fairseq.data.labelled_files import OUTSIDE
from lazyformer_fairseq.evaluation.metrics import count_tags, metric_of_tags
from lazyformer_fairseq.modules.networks.heads import TAGS
from lazyformer_fairseq.training.objectives.interface import Batch
from lazyformer_fairseq.training.objectives.labelled_texts import LabelledTextsObjective

IGNORED = -100  # the target value ignored by cross-entropy


@dataclass(kw_only=True)
class TagsObjective(LabelledTextsObjective):
    """Objective for predicting each word's tag from its first token (Devlin et al., 2019, section 5.3).

    The loss is averaged over words. Truncated words are excluded from the loss, and count as predicted OUTSIDE in the
    metrics.
    """

    head_type: str = TAGS
    DATASET: ClassVar[type[TaggedWordsDataset]] = TaggedWordsDataset

    def score(self, batch: Batch, logits: Tensor, training: bool) -> tuple[Tensor, dict[str, Any]]:
        """Return the summed cross-entropy of logits (B, T, classes) at the words' first tokens, and values to log.

        In evaluation mode, `rows` contains each sentence's counts from :func:`.metrics.count_tags`.
        """
        is_cut = batch["places"] < 0
        targets = batch["target"].masked_fill(is_cut, IGNORED)
        logits_of_words = logits.flatten(0, 1)[batch["places"]]
        loss, log = super().score({"target": targets}, logits_of_words, training)
        if training:
            return loss, log

        names = np.array([*self.description.labels, OUTSIDE])
        predicted = names[log["rows"][:, 0].astype(np.int64)]
        predicted[is_cut.cpu().numpy()] = OUTSIDE
        right = names[batch["target"].cpu().numpy()]

        ends = np.cumsum(batch["words"])[:-1]
        sentences = zip(np.split(predicted, ends), np.split(right, ends), strict=True)
        counts = [count_tags(found.tolist(), there.tolist()) for found, there in sentences]
        log["rows"] = np.array(counts, np.float64)
        return loss, log

    metric = staticmethod(metric_of_tags)
