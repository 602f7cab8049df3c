"""Attention variants, which are selected by the settings of an ``s``.

There is one file per row of the table in :mod:`lazyformer_fairseq.patterns.attention_variants`.
"""
