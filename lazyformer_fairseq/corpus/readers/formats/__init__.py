"""The input formats, one file for each family; ``readers/documents.py`` has their table."""
