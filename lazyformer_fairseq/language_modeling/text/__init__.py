"""WikiText, enwik8 and text8, as data."""
