"""The data of a run, checked before its first update."""
