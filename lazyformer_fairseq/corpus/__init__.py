"""The corpus pipeline, which turns raw text into documents, sentences and the binarized data for ``fairseq-train``."""
