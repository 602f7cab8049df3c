"""Warm starts: a trained encoder's weights initialise an encoder with another pattern."""
