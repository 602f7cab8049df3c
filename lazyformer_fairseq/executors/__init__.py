"""Executors that run jobs on this machine, on a Ray cluster or under Slurm, and checks of torch's support for GPUs."""
