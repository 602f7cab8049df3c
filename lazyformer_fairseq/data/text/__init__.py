"""Conversion of raw text to token ids: normalization, word splitting and tokenization."""
