"""Task ``inputs_masked_lm``: masked language modelling on a prepared task's own inputs, one a block.

Self-pretraining (Amos et al., 2023, "Never Train from Scratch"): before a model learns the labels of a task, it learns
to fill masks in the training inputs of that task and in nothing else.
"""

from pathlib import Path
from typing import Any

from fairseq.tasks import register_task

from lazyformer_fairseq.data.datasets.masked_blocks import MaskedInputsDataset
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.tasks.full_sentences_masked_lm import (
    FullSentencesMaskedLMConfig,
    FullSentencesMaskedLMTask,
)


@register_task("inputs_masked_lm", dataclass=FullSentencesMaskedLMConfig)
class InputsMaskedLMTask(FullSentencesMaskedLMTask):
    """Reads a folder of ``lazyformer tasks``; labels are left alone."""

    @classmethod
    def setup_task(cls, cfg: FullSentencesMaskedLMConfig, **kwargs) -> "InputsMaskedLMTask":
        """Raises a UserError for pairs of texts: inputs are whole already."""
        if cfg.next_sentence:
            raise UserError("--next-sentence: the inputs of a task are whole already; leave it out")
        return super().setup_task(cfg, **kwargs)

    def _dataset_class(self, tokenizer: Path) -> tuple[type[MaskedInputsDataset], dict[str, Any]]:
        """Each input is a block."""
        return MaskedInputsDataset, {}
