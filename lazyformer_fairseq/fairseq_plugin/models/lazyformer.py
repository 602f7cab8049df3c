"""The two fairseq model classes, which cover all our architectures; an architecture is a class plus a sublayer pattern.

Transformer-XL, PAR, Sandwich and lazy PAR are causal language models; all other architectures are encoders.
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
    """The base class of models that are built from (cfg, dictionary) and store the dictionary's hash in their weights.

    Attributes:
        per_word: the name of a weight with one row per token of the dictionary.
    """

    per_word: ClassVar[str]

    @classmethod
    def build_model(cls, cfg, task) -> "CheckedModel":
        """Build the model for a task's dictionary.

        Raises:
            UserError: the sizes are incompatible.
        """
        if isinstance(cfg, Namespace):  # from fairseq.options.get_args, which omits options with default values
            cfg = getattr(cls, "__dataclass").from_namespace(cfg)
        try:
            return cls(cfg, task.source_dictionary)
        except ValueError as error:
            raise UserError(str(error)) from error

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """Load weights.

        Raises:
            UserError: weights have the wrong shape or are for a different dictionary; the message names them.
        """
        self.upgrade_state_dict(state_dict)
        if (experts := getattr(self, "shared_experts", None)) is not None:
            state_dict = experts.own_weights(state_dict)
        match.copy_projections(state_dict, self)
        match.check_same_weights(state_dict, self.state_dict(), self.per_word)
        return BaseFairseqModel.load_state_dict(self, state_dict, strict, model_cfg, args)


@register_model("lazyformer", dataclass=MaskedLMConfig)
class LazyFormerModel(MaskedLM, CheckedModel):
    """A masked language model that stores its dictionary's hash with the weights."""

    def __init__(self, cfg: MaskedLMConfig, dictionary):
        super().__init__(cfg, len(dictionary), dictionary.pad())
        self.encoder.dictionary = dictionary  # an attribute of fairseq's encoders
        self.register_buffer("dictionary_sha256", match.dictionary_hash(dictionary))

    @classmethod
    def from_pretrained(cls, folder: str):
        """Load a checkpoint, along with the dictionary and tokenizer beside it; see :func:`evaluation.loading.load`."""

        def make(options: MaskedLMOptions, dictionary: Any) -> LazyFormerModel:
            return cls(OmegaConf.structured(MaskedLMConfig(**vars(options))), dictionary)

        return loading.load(folder, make, load_safely)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Adapt a checkpoint whose heads or number of positions differ from the model's, and log the changes."""
        super().upgrade_state_dict_named(state_dict, name)
        match.match_classification_heads(state_dict, self.classification_heads)
        positions = self.cfg.max_positions, self.cfg.copy_positions
        match.match_positions(state_dict, self.state_dict(), match.POSITION_EMBEDDINGS, *positions)


config.register_presets("lazyformer", ARCHITECTURES)


@register_model("lazyformer_lm", dataclass=CausalLMConfig)
class CausalLanguageModel(CausalLM, CheckedModel):
    """A causal language model that stores its dictionary's hash with the weights."""

    def __init__(self, cfg: CausalLMConfig, dictionary):
        super().__init__(cfg, len(dictionary), dictionary.pad())
        self.register_buffer("dictionary_sha256", match.dictionary_hash(dictionary))


config.register_presets("lazyformer_lm", CAUSAL_ARCHITECTURES)
