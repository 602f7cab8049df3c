"""fairseq models: the encoder and the causal language model with their presets, and the hub interface."""

from lazyformer_fairseq.fairseq_plugin.models.causal_lm import CausalLanguageModel
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel

__all__ = ["CausalLanguageModel", "LazyFormerModel"]
