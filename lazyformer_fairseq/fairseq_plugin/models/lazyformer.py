"""The fairseq models: every ``--arch`` of ours is one of two classes with another sublayer pattern.

Transformer-XL, PAR, Sandwich and lazy PAR are the causal language model, all others the encoder.
"""

from argparse import Namespace
from typing import Any, ClassVar

from fairseq.models import BaseFairseqModel, register_model
from omegaconf import OmegaConf
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import loading, match
from lazyformer_fairseq.fairseq_plugin.models import config
from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig, MaskedLMConfig
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import load_safely
from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES


class CheckedModel(BaseFairseqModel):
    """The base of models that are built from (cfg, dictionary) and keep the dictionary's hash with their weights.

    Attributes:
        per_word: name of a weight with a row for each word.
    """

    per_word: ClassVar[str]

    @classmethod
    def build_model(cls, cfg, task) -> "CheckedModel":
        """Build the model for a task's dictionary; raise a UserError for sizes that do not fit together."""
        if isinstance(cfg, Namespace):  # as fairseq.options.get_args makes it: it leaves out what has its default
            cfg = getattr(cls, "__dataclass").from_namespace(cfg)
        try:
            return cls(cfg, task.source_dictionary)
        except ValueError as error:
            raise UserError(str(error)) from error

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """Load weights; raise a UserError that names those of another shape or dictionary."""
        self.upgrade_state_dict(state_dict)
        if (experts := getattr(self, "shared_experts", None)) is not None:
            state_dict = experts.own_weights(state_dict)
        match.copy_projections(state_dict, self)
        match.check_same_weights(state_dict, self.state_dict(), self.per_word)
        return BaseFairseqModel.load_state_dict(self, state_dict, strict, model_cfg, args)


@register_model("lazyformer", dataclass=MaskedLMConfig)
class LazyFormerModel(MaskedLM, CheckedModel):
    """The masked language model of a dictionary, whose hash its weights keep."""

    def __init__(self, cfg: MaskedLMConfig, dictionary):
        super().__init__(cfg, len(dictionary), dictionary.pad())
        self.encoder.dictionary = dictionary  # as fairseq's encoders have it
        self.register_buffer("dictionary_sha256", match.dictionary_hash(dictionary))

    @classmethod
    def from_pretrained(cls, folder: str):
        """Load model, dictionary and tokenizer beside a checkpoint; see :func:`evaluation.loading.load`."""

        def make(options: MaskedLMOptions, dictionary: Any) -> LazyFormerModel:
            return cls(OmegaConf.structured(MaskedLMConfig(**vars(options))), dictionary)

        return loading.load(folder, make, load_safely)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Let a checkpoint with other classification heads than the model's load, or with fewer positions; log it."""
        super().upgrade_state_dict_named(state_dict, name)
        match.match_classification_heads(state_dict, self.classification_heads)
        positions = self.cfg.max_positions, self.cfg.copy_positions
        match.match_positions(state_dict, self.state_dict(), match.PER_POSITION, *positions)


config.register_presets("lazyformer", ARCHITECTURES)


@register_model("lazyformer_lm", dataclass=CausalLMConfig)
class CausalLanguageModel(CausalLM, CheckedModel):
    """The causal language model of a dictionary, whose hash its weights keep."""

    def __init__(self, cfg: CausalLMConfig, dictionary):
        super().__init__(cfg, len(dictionary), dictionary.pad())
        self.register_buffer("dictionary_sha256", match.dictionary_hash(dictionary))


config.register_presets("lazyformer_lm", CAUSAL_ARCHITECTURES)
