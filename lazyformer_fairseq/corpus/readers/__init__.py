"""Reads the input: finds its files, divides them into units, and yields the documents of each."""
