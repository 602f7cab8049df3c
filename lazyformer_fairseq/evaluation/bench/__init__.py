"""Benchmarks of models and of attention on this machine: latency, throughput and memory."""
