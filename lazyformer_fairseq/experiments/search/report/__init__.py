"""A search's result as files, tables and pictures."""
