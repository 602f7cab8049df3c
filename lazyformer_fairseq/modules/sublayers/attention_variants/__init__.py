"""Attention variants, which the settings of an ``s`` choose.

Each row of the table in :mod:`lazyformer_fairseq.patterns.attention_variants` has a file here.
"""
