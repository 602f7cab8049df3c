"""What a model costs: parameters and FLOPs by formula, latency by measurement."""
