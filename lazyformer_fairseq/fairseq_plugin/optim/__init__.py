"""The fairseq optimizers, learning-rate schedules and half-precision wrapper."""
