"""Executors that run jobs on this machine, Ray or Slurm, and checks of this machine's GPUs and their torch support."""
