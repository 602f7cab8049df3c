"""The fairseq criterions for masked and causal language modeling and for fine-tuning."""
