"""``lazyformer plan`` tells whether a training fits its GPUs, how they share an update, and how long it takes."""

# The speed of training on a GPU, in TFLOP/s, from LazyFormer's Table 2: its BERT takes 45 seconds for 100 updates on
# eight V100s in half precision. The FLOPs of an update are those of our bert_base. The result is 17% of a V100's peak.
PAPER_TERAFLOPS = 21.4

V100_BYTES = 16 * 10**9  # memory of the paper's GPUs, assumed if there is no GPU
NO_GPU = "no GPU of known memory is here: planned for 16 GB each, as in the paper; --gpus 8x80GB plans for others"
ON_PROCESSOR = 4  # largest batch on a CPU; a larger one takes more memory but no less time
