"""A checkpoint into a folder that transformers loads."""
