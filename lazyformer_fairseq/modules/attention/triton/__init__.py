"""Attention of a lazy block on a GPU: Triton kernels."""
