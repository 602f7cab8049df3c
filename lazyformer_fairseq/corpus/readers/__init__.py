"""The readers of the input, which find its files, divide them into units, and yield the documents of each unit."""
