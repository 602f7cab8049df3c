"""The most memory that a thing held at once, by torch's own accounting: the same number on every run."""

import os
from collections.abc import Callable

import torch

# The profiler says on standard error that it starts and stops. It reads this variable when it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

from torch.profiler import ProfilerActivity, profile

from lazyformer_fairseq.modules.attention.blocks import kept_memory


def peak_memory(thing: Callable[[], object], device: torch.device | str) -> int:
    """Bytes that tensors held at the highest moment of a call, above what they held when it began.

    On a GPU what torch's allocator counts. On a CPU the sum of what torch's allocator gave and took back, which the
    profiler records. Both leave out the scratch memory of libraries such as MKL, cuBLAS and oneDNN.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        thing()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    kept_memory.give_back()  # else what is used again would not count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        thing()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    held = highest = 0
    for _, taken in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += taken
        highest = max(highest, held)
    return highest
