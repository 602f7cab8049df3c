"""Detection of failed memory allocations, and an error that says what did not fit."""

from collections.abc import Callable

import torch
from torch import nn

from lazyformer_fairseq.errors import UserError

GIB = 2**30
# torch's messages on a GPU, on a CPU (c10/core/impl/alloc_cpu.cpp, on Linux and elsewhere), from cuBLAS and from cuDNN.
SIGNS = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class OutOfMemoryInTrainingError(UserError):
    """A failed memory allocation; the message says what did not fit and what to change."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports a failed allocation, in torch or in a library that it calls."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)


def build_in_memory(build: Callable[[], nn.Module]) -> nn.Module:
    """Call a function that builds a model, and explain the error if the model does not fit in memory.

    Raises:
        OutOfMemoryInTrainingError: the weights do not fit; the message gives their number and the memory they need.
    """
    try:
        return build()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in build().parameters())
    raise OutOfMemoryInTrainingError(
        f"the model does not fit in memory: it has {parameters:,} parameters, which need {4 * parameters / GIB:,.0f} "
        f"GiB, and {16 * parameters / GIB:,.0f} GiB in training with Adam; choose a smaller model"
    )
