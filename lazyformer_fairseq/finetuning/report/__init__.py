"""Results of a grid, and the tables and pictures that every task shares."""
