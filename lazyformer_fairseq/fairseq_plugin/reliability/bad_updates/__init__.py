"""NaN, Inf and loss spikes: skips bad updates, and rolls back or stops after many of them."""
