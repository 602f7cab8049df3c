"""``lazyformer pretrain``, which launches fairseq-train on all of the machine's GPUs or on its CPU."""
