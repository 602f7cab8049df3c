"""Attention that computes no more than its mask shows, in tiles; see :mod:`.geometry`."""
