"""Modules of the sublayers that the letters of a pattern stand for, and the residual connection around each."""
