"""Plans runs for ``lazyformer plan``: whether a run fits on its GPUs, the batch size per GPU, and the training time."""

# Training speed per GPU in TFLOP/s, from Table 2 of the LazyFormer paper: its BERT takes 45 seconds for 100 updates on
# eight V100s in half precision. The FLOPs per update are our bert_base's. The result is 17% of a V100's peak.
PAPER_TERAFLOPS = 21.4

V100_BYTES = 16 * 10**9  # memory of the paper's GPUs, assumed if there is no GPU
NO_GPU = "found no GPU with known memory: planning for GPUs with 16 GB, as in the paper; use --gpus to plan for others"
ON_PROCESSOR = 4  # maximum batch size on a CPU; larger batches need more memory but are not faster
