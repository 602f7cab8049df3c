"""Benchmarks, one file each: a task, or several tasks that share a table, with everything that is specific to them."""
