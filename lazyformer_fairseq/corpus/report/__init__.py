"""What a corpus says of how it came about."""
