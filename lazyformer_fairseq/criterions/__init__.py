"""fairseq criterions: masked LM with accuracy, and GLUE."""
