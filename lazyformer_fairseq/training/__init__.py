"""Training in plain torch, without fairseq: the training loop, objectives, optimizers, schedules and recipes."""
