"""Sublayer modules, one class per letter of a pattern, and the residual connection around them."""
