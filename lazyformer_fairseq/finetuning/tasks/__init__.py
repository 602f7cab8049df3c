"""Benchmarks: each has its own file, which contains all code that is specific to the benchmark's tasks."""
