"""Masked and permuted language modelling: MPNet, or XLNet with ``--permuted-only``."""

from dataclasses import dataclass
from typing import ClassVar

from lazyformer_fairseq.data.masked_text import PERMUTED
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective


@dataclass
class PermutedLMObjective(MaskedLMObjective):
    """The objective of predicting the last tokens of permuted blocks.

    Its `text` also takes the options of :class:`~lazyformer_fairseq.data.masked_text.PermutedTextOptions`.
    """

    TASK: ClassVar[str] = PERMUTED
