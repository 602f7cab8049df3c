"""Model evaluation: loading and inference without fairseq, exports, benchmarks, and training plans."""
