"""Grids of fine-tuning runs for any task: models x learning rates x seeds, their queue, results and report."""
