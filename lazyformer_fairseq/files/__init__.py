"""Files that are there whole or not at all, and the formats that several parts of the project share."""
