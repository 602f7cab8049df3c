"""``lazyformer reproduce``: the tables and figures of LazyFormer and PAR Transformer, from raw text to a report."""
