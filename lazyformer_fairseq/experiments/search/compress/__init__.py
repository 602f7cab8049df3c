"""Searches a pattern that starts from a trained encoder: each sublayer's changes scored, none trained."""
