"""The stages of ``lazyformer corpus``, and who runs them where."""
