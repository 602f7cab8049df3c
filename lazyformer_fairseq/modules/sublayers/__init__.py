"""Modules that the letters of a pattern build, and the residual connection around each."""
