"""Costs of a model: counts of parameters and FLOPs, measurements of time and memory."""
