"""A model's costs: parameter and FLOP counts, and time and memory measurements."""
