"""Checkpoints: written whole, kept, chosen, checked before they are read."""
