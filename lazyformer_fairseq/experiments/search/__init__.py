"""Searches for sublayer patterns: a single one, as in PAR Transformer, section 2, or one per latency budget."""
