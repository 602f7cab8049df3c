"""``lazyformer reproduce``: LazyFormer's tables and figures, from raw text to one page."""
