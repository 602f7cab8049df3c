"""ListOps: nested operations on lists of digits."""
