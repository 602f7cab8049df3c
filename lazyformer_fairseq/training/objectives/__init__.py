"""Training objectives: what a model learns, whichever trainer runs it."""
