"""``lazyformer reproduce``: reproduce the tables and figures of two papers, LazyFormer and PAR Transformer."""
