"""fairseq criterions: masked LM with accuracy, causal LM, and GLUE."""
