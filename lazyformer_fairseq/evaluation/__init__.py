"""Evaluation of models: loading and inference without fairseq, exports, benchmarks, and plans of trainings."""
