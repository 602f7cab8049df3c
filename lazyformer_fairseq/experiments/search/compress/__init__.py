"""The training-free search for faster patterns that start from a trained encoder, based on scores of single changes."""
