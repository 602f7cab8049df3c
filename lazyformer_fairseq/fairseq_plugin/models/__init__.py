"""The fairseq models: the encoder and the causal language model, with their presets and hub interface."""

from lazyformer_fairseq.fairseq_plugin.models.lazyformer import CausalLanguageModel, LazyFormerModel

__all__ = ["CausalLanguageModel", "LazyFormerModel"]
