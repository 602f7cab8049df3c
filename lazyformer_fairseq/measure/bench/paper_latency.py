"""The latencies that PAR Transformer's Table 4 prints."""

# In milliseconds on an A100, of SQuAD's inference. + marks an estimate: 61% of BERT's, by DistilBERT's paper.
PAPER_LATENCY = {"distilbert_base": "5.3+", "bert_base_absolute": "8.6", "par_bert_base": "5.7"}
