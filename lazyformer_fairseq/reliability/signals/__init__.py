"""A run that is asked to end saves first."""
