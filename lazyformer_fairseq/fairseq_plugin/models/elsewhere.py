"""Models of fairseq's own, built as fairseq-train builds them, for a loop that is not fairseq's."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from torch import nn

from lazyformer_fairseq.fairseq_plugin.kinds import as_fairseq


def build(words: Sequence[str], dictionary: Any) -> nn.Module:
    """The model that words of a fairseq-train of masked text name, with fresh weights."""
    command = ["data", "--task", "full_sentences_masked_lm", "--criterion", "masked_lm_accuracy", *words]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command))
    as_fairseq(dictionary)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, cfg=cfg.task)
    return build_model(cfg.model, task)
