"""``lazyformer pretrain``: fairseq-train on the GPUs there are."""
