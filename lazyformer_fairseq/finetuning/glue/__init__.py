"""GLUE: one table of tasks, a reader of the official files, and the metrics. No torch here."""
