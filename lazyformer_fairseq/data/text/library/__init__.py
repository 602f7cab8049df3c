"""Tokenizers that came with another model, run by the library `tokenizers`."""
