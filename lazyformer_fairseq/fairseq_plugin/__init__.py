"""The fairseq plugin: models, tasks, criterions, optimizers and schedules, and reliable training runs."""
