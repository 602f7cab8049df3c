"""Searches a sublayer pattern by gradient descent: PAR Transformer, section 2, and lazy attention beside it."""
