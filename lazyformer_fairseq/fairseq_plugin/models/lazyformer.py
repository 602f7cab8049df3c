"""The fairseq models: every ``--arch`` of ours is one of two classes with another sublayer pattern.

Transformer-XL, PAR, Sandwich and lazy PAR are the causal language model, all others the encoder.
"""

from typing import Optional

from fairseq.models import register_model
from torch import Tensor

from lazyformer_fairseq.fairseq_plugin.models import checkpoint_match, config, hub
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import CheckedModel
from lazyformer_fairseq.fairseq_plugin.models.config import CausalLMConfig, MaskedLMConfig
from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES


@register_model("lazyformer", dataclass=MaskedLMConfig)
class LazyFormerModel(MaskedLM, CheckedModel):
    """The masked language model of a dictionary, whose hash its weights keep."""

    def __init__(self, cfg: MaskedLMConfig, dictionary):
        super().__init__(cfg, len(dictionary), dictionary.pad())
        self.encoder.dictionary = dictionary  # as fairseq's encoders have it
        self.register_buffer("dictionary_sha256", checkpoint_match.dictionary_hash(dictionary))

    @classmethod
    def from_pretrained(cls, folder: str, checkpoint_file: Optional[str] = None):
        """Loads model, dictionary and tokenizer from a folder of checkpoints; see :func:`models.hub.load`."""
        return hub.load(cls, folder, checkpoint_file)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Lets a checkpoint with other classification heads than the model's load, or with fewer positions; logs it."""
        super().upgrade_state_dict_named(state_dict, name)
        checkpoint_match.match_classification_heads(state_dict, self.classification_heads)
        positions = self.cfg.max_positions, self.cfg.copy_positions
        checkpoint_match.match_positions(state_dict, self.state_dict(), checkpoint_match.PER_POSITION, *positions)


config.register_presets("lazyformer", ARCHITECTURES)


@register_model("lazyformer_lm", dataclass=CausalLMConfig)
class CausalLanguageModel(CausalLM, CheckedModel):
    """The causal language model of a dictionary, whose hash its weights keep."""

    def __init__(self, cfg: CausalLMConfig, dictionary):
        super().__init__(cfg, len(dictionary), dictionary.pad())
        self.register_buffer("dictionary_sha256", checkpoint_match.dictionary_hash(dictionary))


config.register_presets("lazyformer_lm", CAUSAL_ARCHITECTURES)
