"""Readers of the input: which files there are, how they are divided into units, and the documents of each."""
