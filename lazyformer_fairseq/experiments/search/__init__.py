"""Searches for sublayer patterns: a single pattern, as in section 2 of PAR Transformer, or one per latency budget."""
