"""Whole networks: the stack of sublayers, the encoder and the causal decoder around it, embeddings and heads."""
