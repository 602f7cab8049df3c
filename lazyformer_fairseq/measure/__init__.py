"""Counts and measurements: parameters, FLOPs, memory, time; what fits."""
