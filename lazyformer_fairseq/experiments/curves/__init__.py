"""``lazyformer curves``: a table and a plot of validation losses, read from the runs' records."""
