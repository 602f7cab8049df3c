"""A grid of fine-tunings on whatever machines there are."""
