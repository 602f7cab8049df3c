"""The most memory that a thing holds at once, by torch's own accounting: the same number on every run."""

import gc
import os
from collections.abc import Callable

import torch

# The profiler logs its start and stop to standard error. It reads this variable at first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

from torch.profiler import ProfilerActivity, profile

from lazyformer_fairseq.modules.attention import pieces


def peak_memory(thing: Callable[[], object], device: torch.device | str) -> int:
    """Peak bytes that tensors hold during a call, above what they held when it began.

    On a GPU torch's allocator counts them. On a CPU the profiler records what torch's allocator gives and takes back,
    and we add that up. Both leave out the scratch memory of libraries such as MKL, cuBLAS and oneDNN.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        thing()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    pieces.give_back()  # else reused memory would not count
    gc.collect()  # else garbage from before may be freed during the call, and count as less than nothing
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        thing()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    held = highest = 0
    for _, taken in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += taken
        highest = max(highest, held)
    return highest
