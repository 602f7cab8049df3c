"""GLUE's files prepared for a checkpoint's tokenizer."""
