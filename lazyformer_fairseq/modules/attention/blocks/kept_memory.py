"""Memory for distributions on a processor, kept from one update to the next.

Each update writes distributions of some hundred megabytes. Asked for anew, that memory comes from the operating system
page by page, which took a third as long as computing what goes in. GPUs need none of this: torch keeps their memory.
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
    """An uninitialised contiguous tensor of the device and precision of `like`.

    When nothing refers to it any more its memory serves the next request of this size; a request of another size gives
    what is free back to the system.
    """
    if like.device.type != "cpu":
        return like.new_empty(shape)
    size = math.prod(shape) * like.element_size()
    if not size:
        return like.new_empty(shape)
    if _free and _free[-1].nbytes != size:
        _free.clear()
    memory = _free.pop() if _free else torch.empty(size, dtype=torch.uint8).numpy()
    lease = memory.view()  # the tensor's storage holds on to this array, and lets go of it when it is freed
    weakref.finalize(lease, _free.append, memory).atexit = False
    return torch.from_numpy(lease).view(like.dtype).view(*shape)


def scratch(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """As :func:`empty`, for what a function needs only while it runs: the next request of a name gets the same memory.

    Each thread has memory of its own, as large as the largest request under a name.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size:
        return like.new_empty(shape)
    memory = getattr(_scratch, name, None)
    if memory is None or memory.nbytes < size:
        memory = torch.empty(size, dtype=torch.uint8).numpy()
        setattr(_scratch, name, memory)
    # A new tensor each time: one that was made in inference mode could not be written to outside of it.
    return torch.from_numpy(memory[:size]).view(like.dtype).view(*shape)


def give_back() -> None:
    """Gives all that is free, and this thread's scratch memory, back to the system, as before measuring memory."""
    _free.clear()
    vars(_scratch).clear()
