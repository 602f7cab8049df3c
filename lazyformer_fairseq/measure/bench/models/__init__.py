"""``lazyformer bench``: whole models beside baselines."""
