"""Runs of a grid: what decides each, where they run, and in which order."""
