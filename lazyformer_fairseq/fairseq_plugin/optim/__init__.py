"""Optimizer and learning-rate schedule of the paper."""
