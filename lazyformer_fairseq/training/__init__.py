"""The loop that trains without fairseq, optimizers, schedules and recipes, all of plain torch."""
