"""Attention variants that the settings of an ``s`` choose: one file per row of :mod:`lazyformer_fairseq.patterns.attention_kinds`."""
