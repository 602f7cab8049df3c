"""What a letter of a pattern builds: the modules, and the residual connection around each."""
