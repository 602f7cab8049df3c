"""``lazyformer plan``: whether a training fits its GPUs, how it shares an update, and how long it takes."""
