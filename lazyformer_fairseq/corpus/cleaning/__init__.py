"""Cleans documents, and drops some, before they are divided into sentences."""
