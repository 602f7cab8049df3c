"""Runs of a grid on SQuAD."""
