"""What a letter of a pattern builds: one file a kind, and the residual connection around each."""
