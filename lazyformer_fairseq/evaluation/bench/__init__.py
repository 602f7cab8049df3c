"""The cost of a model: parameters and FLOPs counted, latency measured."""
