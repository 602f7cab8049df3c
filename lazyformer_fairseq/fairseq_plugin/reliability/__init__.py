"""Reliability of long fairseq runs: intact checkpoints, preemption, exact resuming, bad updates and damaged files."""
