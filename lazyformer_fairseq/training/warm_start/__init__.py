"""Weights of a trained encoder become weights of one with another pattern."""
