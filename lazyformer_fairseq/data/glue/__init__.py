"""GLUE's table of tasks, its files, and what is made of them."""
