"""``lazyformer pretrain``, ``lazyformer finetune``, ``lazyformer lm train``: fairseq-train on the GPUs there are."""
