"""Zero-shot evaluation of language models on minimal pairs, without training on the task."""
