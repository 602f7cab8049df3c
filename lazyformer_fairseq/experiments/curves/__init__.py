"""``lazyformer curves``: the validation loss of runs, from their records."""
