"""Perplexity and bits per character."""
