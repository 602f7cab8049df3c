"""This machine's GPUs, by nvidia-smi, and their precision: torch takes seconds to import. ``python -m`` counts them."""

import functools
import os
import re
import subprocess
from collections.abc import Collection
from itertools import takewhile
from typing import Optional

Capability = tuple[int, int]  # compute capability, as (7, 0)
# NVIDIA, CUDA C++ Programming Guide, table of features by compute capability: Ampere's tensor cores were the first with
# bfloat16. Older GPUs emulate it, slowly, and torch.cuda.is_bf16_supported() is true of them.
LEAST_WITH_BF16 = (8, 0)


def visible_gpus() -> list[str]:
    """Return the GPUs that torch will see, as CUDA_VISIBLE_DEVICES names them; nvidia-smi knows nothing of it."""
    there = gpus_of_machine()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not there:
        return list(map(str, range(there)))
    names = filter(None, map(str.strip, chosen.split(",")))
    return list(takewhile(lambda name: not name.startswith("-"), names))  # -1 ends the list


def gpus_of_machine() -> int:
    """Return how many a working driver sees."""
    return sum(line.startswith("GPU") for line in _ask("-L"))


def count_gpus() -> int:
    """Return how many torch will see."""
    return len(visible_gpus())


def capabilities() -> list[Capability]:
    """Return that of every GPU of the machine; none where the driver is too old to tell."""
    lines = _ask("--query-gpu=compute_cap", "--format=csv,noheader")
    found = []
    for line in lines:
        number = re.fullmatch(r"\s*(\d+)\.(\d+)\s*", line)
        if number is None:
            return []
        found.append((int(number[1]), int(number[2])))
    return found


def smallest_memory() -> Optional[int]:
    """Return the bytes of the GPU that has least; None where there is none, and where the driver does not tell."""
    lines = _ask("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    if lines and all(line.strip().isdigit() for line in lines):
        return min(int(line) * 2**20 for line in lines)
    return None


def driver() -> Optional[int]:
    """Return the driver's release, as 580 of 580.65.06; None where there is none."""
    lines = _ask("--query-gpu=driver_version", "--format=csv,noheader")
    release = "".join(lines[:1]).strip().partition(".")[0]
    if release.isdigit():
        return int(release)
    return None


@functools.cache  # every run of a command asks, more than once; the answers take some tenths of a second
def _ask(*options: str) -> list[str]:
    try:
        answer = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode == 0:
        return answer.stdout.splitlines()
    return []


def precision_of(found: Collection[Capability]) -> str:
    """Return the precision for GPUs of these capabilities: bf16 where all have it, else fp16, also for unknown ones."""
    if found and min(found) >= LEAST_WITH_BF16:
        return "bf16"
    return "fp16"


def precision_here() -> str:
    """Return that of this machine, by nvidia-smi, so that neither torch nor CUDA starts: fp32 without a GPU."""
    if count_gpus():
        return precision_of(capabilities())
    return "fp32"


def precision_on(device: str) -> str:
    """Return that of ``cpu`` (fp32) or of the GPU that torch uses, ``cuda``."""
    if device == "cpu":
        return "fp32"
    import torch

    return precision_of([torch.cuda.get_device_capability()])


if __name__ == "__main__":
    print(count_gpus())
