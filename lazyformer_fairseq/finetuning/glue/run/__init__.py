"""Runs a grid of fine-tunings on whatever machines there are."""
