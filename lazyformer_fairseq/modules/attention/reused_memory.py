"""CPU memory that is reused from update to update.

Each update writes distributions of a few hundred megabytes. The operating system would allocate new memory for them
page by page, which took a third as long as computing the contents when we measured it. On GPUs no such reuse is needed,
because torch caches their memory.
"""

import math
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_free: list[np.ndarray] = []
_scratch = threading.local()


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor with the device and data type of `like`.

    When the tensor is garbage-collected, its memory is reused for the next request of the same size. A request of a
    different size returns all free memory to the system.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size:
        return like.new_empty(shape)
    if _free and _free[-1].nbytes != size:
        _free.clear()
    if _free:
        memory = _free.pop()
    else:
        memory = torch.empty(size, dtype=torch.uint8).numpy()
    lease = memory.view()  # the tensor's storage keeps this array alive until the storage is freed
    finalizer = weakref.finalize(lease, _free.append, memory)
    finalizer.atexit = False  # type: ignore[misc]  # missing in typeshed's __slots__, but documented
    return torch.from_numpy(lease).view(like.dtype).view(*shape)


def scratch(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an uninitialized tensor, as :func:`empty` does, for a function's temporary data.

    The next request with the same name reuses the memory. Each thread has its own memory, which grows to the largest
    request under each name.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size:
        return like.new_empty(shape)
    memory = getattr(_scratch, name, None)
    if memory is None or memory.nbytes < size:
        memory = torch.empty(size, dtype=torch.uint8).numpy()
        setattr(_scratch, name, memory)
    # A new tensor is created each time, because tensors created in inference mode cannot be written outside it.
    return torch.from_numpy(memory[:size]).view(like.dtype).view(*shape)


def give_back() -> None:
    """Return all free memory and this thread's scratch memory to the system, for example to measure memory use."""
    _free.clear()
    vars(_scratch).clear()
