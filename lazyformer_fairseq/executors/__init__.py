"""The GPUs of this machine: how many, what they can compute with, and whether torch has kernels for them."""
