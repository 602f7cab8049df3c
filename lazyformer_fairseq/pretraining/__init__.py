"""``lazyformer pretrain``, ``lazyformer finetune``: fairseq-train on the GPUs there are."""
