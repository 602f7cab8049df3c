"""fairseq tasks: masked-LM pre-training, GLUE fine-tuning, language models of streams."""
