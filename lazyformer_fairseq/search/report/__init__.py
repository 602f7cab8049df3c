"""What a search found, as files, tables and pictures."""
