"""Memory for distributions on a processor, kept from one update to the next.

Each update writes distributions of some hundred megabytes. Asked for anew, that memory comes from the operating system
page by page, which took a third as long as computing what goes in. GPUs need none of this: torch keeps their memory.
"""

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_free: list[np.ndarray] = []


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of the device and precision of `like`.

    When nothing refers to it any more its memory serves the next request of this size; a request of another size gives
    what is free back to the system.
    """
    if like.device.type != "cpu":
        return like.new_empty(shape)
    size = int(np.prod(shape)) * like.element_size()
    if not size:
        return like.new_empty(shape)
    if _free and _free[-1].nbytes != size:
        _free.clear()
    memory = _free.pop() if _free else torch.empty(size, dtype=torch.uint8).numpy()
    lease = memory.view()  # the tensor's storage holds on to this array, and lets go of it when it is freed
    weakref.finalize(lease, _free.append, memory).atexit = False
    return torch.from_numpy(lease).view(like.dtype).view(*shape)


def give_back() -> None:
    """Gives all that is free back to the system, as before measuring memory."""
    _free.clear()
