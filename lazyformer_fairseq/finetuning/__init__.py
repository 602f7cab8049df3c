"""Fine-tuning on any task: grids of runs (models x learning rates x seeds), with a queue, results and a report."""
