"""lazyformer diagnostics: made tasks with long inputs show whether a pattern sees far enough. No leaderboard."""
