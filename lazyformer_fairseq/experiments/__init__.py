"""Experiments: trainings in turn, kept in a folder, resumed, reported."""
