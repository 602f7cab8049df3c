"""Safety of long runs: whole checkpoints, preemption, exact resume, bad numbers, bad files."""
