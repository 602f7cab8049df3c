"""Whole networks: the stack of sublayers, encoders and causal decoders around it, embeddings and heads."""
