"""SQuAD v1.1: the official files, windows of their paragraphs, answers and their marks."""
