"""``lazyformer bench loader``: the loader of training data."""
