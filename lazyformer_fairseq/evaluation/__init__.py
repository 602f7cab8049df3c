"""Costs and results of models: a trained model read without fairseq, what it says of text, benchmarks, plans."""
