"""What candidates cost in latency."""
