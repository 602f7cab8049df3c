"""Datasets and the tokenizer."""
