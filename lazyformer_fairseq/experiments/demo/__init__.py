"""``make demo``: two tiny models, pre-trained and fine-tuned on text that is at hand without a network."""
