"""Warm starts: a trained encoder's weights initialize an encoder with a different pattern."""
