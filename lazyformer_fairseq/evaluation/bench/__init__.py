"""What a model costs: parameters and FLOPs counted, latency by measurement."""
