"""What keeps a long run safe: whole checkpoints, preemption, exact resume, bad numbers, bad files."""
