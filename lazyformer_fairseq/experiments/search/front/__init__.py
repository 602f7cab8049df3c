"""A front in one run: a pattern for each of several budgets of latency, found by any method, beside its control."""
