"""fairseq tasks: masked-LM pre-training, language models of streams."""
