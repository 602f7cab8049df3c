"""Masked and permuted language modeling: MPNet, or XLNet with ``--permuted-only``."""

from dataclasses import dataclass
from typing import ClassVar

from lazyformer_fairseq.data.masked_text import PERMUTED
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective


@dataclass
class PermutedLMObjective(MaskedLMObjective):
    """Objective for predicting the last tokens of permuted blocks.

    `text` also accepts the options of :class:`~lazyformer_fairseq.data.masked_text.PermutedTextOptions`.
    """

    TASK: ClassVar[str] = PERMUTED
