"""Searches for a sublayer pattern by gradient descent: PAR Transformer, section 2, extended by lazy attention."""
