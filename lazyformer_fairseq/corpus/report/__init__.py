"""A corpus's report of how it was made."""
