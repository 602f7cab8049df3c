"""``lazyformer pretrain``: launches fairseq-train on all GPUs of the machine, or on the CPU."""
