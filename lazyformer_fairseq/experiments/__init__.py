"""Experiments: sets of training runs that keep their state in a folder, can be resumed, and end in a report."""
