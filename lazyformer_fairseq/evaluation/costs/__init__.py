"""What a model costs: parameters and FLOPs counted, memory by formula, seconds and memory by measurement."""
