"""What a model costs: parameters and FLOPs counted, seconds and memory measured."""
