"""The fairseq criterions for masked and causal language modelling and for fine-tuning."""
