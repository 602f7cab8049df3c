"""GLUE's table of tasks, its files, and the data made from them."""
