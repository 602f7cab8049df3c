"""What a model costs: parameters and FLOPs by formula, seconds and memory by measurement."""
