"""The stages of ``lazyformer corpus``, and the executors that run them."""
