"""The latency that candidates cost."""
