"""Grids of fine-tuning runs, whatever the task: models x rates x seeds, their queue, their results, their report."""
