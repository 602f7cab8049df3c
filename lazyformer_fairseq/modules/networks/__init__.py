"""Complete networks: the stack of sublayers, the encoder and causal decoder built on it, embeddings, and heads."""
