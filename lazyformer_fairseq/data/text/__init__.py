"""Conversion of raw text to token ids: normalisation, division into words, tokenization."""
