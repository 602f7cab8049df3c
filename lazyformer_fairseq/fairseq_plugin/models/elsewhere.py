"""fairseq's own models, built as in fairseq-train, for our training loop."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from torch import nn

from lazyformer_fairseq.fairseq_plugin.fairseq_classes import as_fairseq


@dataclass(frozen=True)
class FairseqNetwork:
    """One of fairseq's own models; see :class:`~lazyformer_fairseq.training.objectives.network.Network`.

    Attributes:
        words: the fairseq-train options that describe the model, including ``--arch``.
    """

    words: tuple[str, ...]

    def build(self, dictionary: Any) -> nn.Module:
        """Build the model with fresh weights."""
        command = ["data", "--task", "full_sentences_masked_lm", "--criterion", "masked_lm_accuracy", *self.words]
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command))
        as_fairseq(dictionary)
        task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, cfg=cfg.task)
        return build_model(cfg.model, task)

    def settings(self) -> dict[str, Any]:
        """Return the settings that checkpoints store."""
        return {"_name": self.words[self.words.index("--arch") + 1]}
