"""Trains models update by update, in turn."""
