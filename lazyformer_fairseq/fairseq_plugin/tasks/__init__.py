"""fairseq tasks for masked-LM pre-training, language models on streams, and fine-tuning."""
