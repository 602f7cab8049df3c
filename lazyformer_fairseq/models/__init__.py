"""fairseq models: one config, one model, one preset per row of the table of architectures, and the hub interface."""

from lazyformer_fairseq.models.lazyformer import LazyFormerModel

__all__ = ["LazyFormerModel"]
