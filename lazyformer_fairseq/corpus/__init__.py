"""The corpus pipeline, from raw text to documents, sentences and the binarized data that ``fairseq-train`` reads."""
