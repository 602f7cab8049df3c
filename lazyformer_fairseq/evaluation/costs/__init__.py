"""The cost of a model: parameters and FLOPs counted, seconds and memory measured."""
