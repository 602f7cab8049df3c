"""Benchmarks: all that is of one task, or of several that stand in one table, a file each."""
