"""Zero-shot evaluation: what a language model prefers, without any training on the task."""
