"""Benchmarks, one file each, with all code that is specific to a benchmark's tasks."""
