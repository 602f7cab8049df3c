"""lazyformer tasks: made tasks with long inputs, whether a pattern sees far enough. Diagnostics, not a leaderboard."""
