"""The fairseq optimizers and learning-rate schedules, and half precision with exact sums and checkpoints."""
