"""Attention of a lazy block on a processor, piece by piece, in torch."""
