"""Detection of out-of-memory errors, and an error class for reporting what did not fit."""

from collections.abc import Callable

import torch
from torch import nn

from lazyformer_fairseq.errors import UserError

GIB = 2**30
# Parts of the error messages from torch on GPUs, torch on CPUs (c10/core/impl/alloc_cpu.cpp, which has one message for
# Linux and one for other systems), cuBLAS and cuDNN.
SIGNS = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class OutOfMemoryInTrainingError(UserError):
    """Raised when a memory allocation fails; the message states what did not fit and what to change."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error reports a failed allocation in torch or in a library that torch calls."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)


def build_in_memory(build: Callable[[], nn.Module]) -> nn.Module:
    """Call a function that builds a model, and raise an informative error if the model does not fit in memory.

    Raises:
        OutOfMemoryInTrainingError: the weights do not fit; the message states the number of parameters and the memory
            that they need.
    """
    try:
        return build()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in build().parameters())
    raise OutOfMemoryInTrainingError(
        f"the model does not fit in memory: its {parameters:,} parameters need {4 * parameters / GIB:,.0f} "
        f"GiB, or {16 * parameters / GIB:,.0f} GiB when training with Adam; choose a smaller model"
    )
