"""The training-free search for faster versions of a trained encoder, based on the scores of single changes."""
