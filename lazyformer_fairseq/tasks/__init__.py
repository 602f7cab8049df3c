"""fairseq tasks: masked-LM pre-training and GLUE fine-tuning."""
