"""Attention variants that the settings of an ``s`` choose: one file per row of the table.

The table is :mod:`lazyformer_fairseq.patterns.attention_variants`.
"""
