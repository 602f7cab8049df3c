"""Zero-shot evaluation of language models by their preferences, without any training on the task."""
