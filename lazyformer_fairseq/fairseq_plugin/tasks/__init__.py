"""The fairseq tasks for masked-LM pre-training, causal language modeling on streams, and fine-tuning."""
