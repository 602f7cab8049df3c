"""NaN, Inf and loss spikes: updates that are skipped, and what follows from many of them."""
