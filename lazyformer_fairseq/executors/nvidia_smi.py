"""Queries nvidia-smi for this machine's GPUs and chooses a precision for them, without importing torch.

Importing torch would take seconds.

When run with ``python -m``, this module prints the number of GPUs.
"""

import functools
import os
import re
import subprocess
from collections.abc import Collection
from itertools import takewhile
from typing import Optional

Capability = tuple[int, int]  # compute capability, such as (7, 0)
# Ampere's tensor cores were the first to support bfloat16 (NVIDIA, CUDA C++ Programming Guide, table of features by
# compute capability). Older GPUs emulate it slowly, but torch.cuda.is_bf16_supported() returns True for them too.
LEAST_WITH_BF16 = (8, 0)


def visible_gpus() -> list[str]:
    """Return the GPUs that torch will see; this respects CUDA_VISIBLE_DEVICES, which nvidia-smi itself ignores."""
    there = gpus_of_machine()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not there:
        return list(map(str, range(there)))
    names = filter(None, map(str.strip, chosen.split(",")))
    return list(takewhile(lambda name: not name.startswith("-"), names))  # -1 ends the list


def gpus_of_machine() -> int:
    """Return the number of GPUs in this machine, or 0 without a working driver."""
    return sum(line.startswith("GPU") for line in _ask("-L"))


def count_gpus() -> int:
    """Return the number of GPUs that torch will see."""
    return len(visible_gpus())


def capabilities() -> list[Capability]:
    """Return the compute capabilities of all GPUs in the machine; empty if the driver is too old to report them."""
    lines = _ask("--query-gpu=compute_cap", "--format=csv,noheader")
    found = []
    for line in lines:
        number = re.fullmatch(r"\s*(\d+)\.(\d+)\s*", line)
        if number is None:
            return []
        found.append((int(number[1]), int(number[2])))
    return found


def smallest_memory() -> Optional[int]:
    """Return the memory of the smallest GPU in bytes, or None if there is no GPU or the driver does not report it."""
    lines = _ask("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    if lines and all(line.strip().isdigit() for line in lines):
        return min(int(line) * 2**20 for line in lines)
    return None


def driver() -> Optional[int]:
    """Return the driver's major version, such as 580 for 580.65.06, or None if there is no driver."""
    lines = _ask("--query-gpu=driver_version", "--format=csv,noheader")
    if not lines:
        return None
    release, _, _ = lines[0].strip().partition(".")
    if release.isdigit():
        return int(release)
    return None


@functools.cache  # every command asks several times, and each query takes a few tenths of a second
def _ask(*options: str) -> list[str]:
    try:
        answer = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode == 0:
        return answer.stdout.splitlines()
    return []


def precision_of(found: Collection[Capability]) -> str:
    """Return the precision for GPUs with these compute capabilities: bf16 if all of them support it, otherwise fp16.

    If the capabilities are unknown, the precision is fp16.
    """
    if found and min(found) >= LEAST_WITH_BF16:
        return "bf16"
    return "fp16"


def precision_here() -> str:
    """Return the precision for this machine (fp32 if it has no GPU); torch and CUDA are not initialized."""
    if count_gpus():
        return precision_of(capabilities())
    return "fp32"


def precision_on(device: str) -> str:
    """Return the precision for a device: fp32 for ``cpu``; for ``cuda``, the precision for the GPU that torch uses."""
    if device == "cpu":
        return "fp32"
    import torch

    return precision_of([torch.cuda.get_device_capability()])


if __name__ == "__main__":
    print(count_gpus())
