"""Searches for sublayer patterns: one as in PAR Transformer, section 2, or fronts of budgets by any method; orders."""
