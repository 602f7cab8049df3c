"""``lazyformer curves``: validation loss of runs, from their logs."""
