"""Predictions for GLUE's server."""
