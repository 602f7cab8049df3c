"""Masked and permuted language modelling: MPNet, and XLNet with ``--permuted-only``."""

from dataclasses import dataclass
from typing import ClassVar

from lazyformer_fairseq.data.masked_text import PERMUTED
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective


@dataclass
class PermutedLMObjective(MaskedLMObjective):
    """Prediction of the last tokens of permuted blocks; `text` takes the options of permuted text too."""

    TASK: ClassVar[str] = PERMUTED
