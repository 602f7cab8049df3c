"""Input readers, which find the input files, divide them into units, and yield each unit's documents."""
