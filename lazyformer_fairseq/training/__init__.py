"""Models trained update by update, in turn."""
