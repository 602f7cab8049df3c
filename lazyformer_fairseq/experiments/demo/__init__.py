"""``make demo``: two tiny models that are pre-trained and fine-tuned on text that needs no download."""
