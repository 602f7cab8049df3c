"""``lazyformer plan``: whether a training fits its GPUs, how it shares an update, and how long it takes."""

# What training reaches on a GPU, in TFLOP/s: LazyFormer, Table 2. Its BERT takes 45 seconds for 100 updates on eight
# V100s, in half precision; the FLOPs of an update are those of our bert_base. That is 17% of a V100's peak.
PAPER_TERAFLOPS = 21.4

V100_BYTES = 16 * 10**9  # of the paper's GPUs, for a plan where none is
NO_GPU = "no GPU of known memory is here: planned for 16 GB each, as the paper's; --gpus 8x80GB plans for others"
ON_PROCESSOR = 4  # sequences at once: more take memory and no less time
