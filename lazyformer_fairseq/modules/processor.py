"""Identification of CPUs and GPUs, so that speed measurements can be reused on identical devices."""

import functools
import platform

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lazyformer_fairseq.executors.cpuinfo import first_core

# Fields of /proc/cpuinfo that distinguish CPUs with the same model name; only ARM CPUs have the last two.
IDENTITY = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")


@functools.cache
def device_key(device: str) -> str:
    """Return the key under which a device's speed measurements are stored.

    A GPU's key is its name and compute capability. A CPU's key consists of its model name, which may be as vague as
    "AMD EPYC"; its vendor, family and model number where Linux reports them; and the vector instructions used by torch.

    Args:
        device: cpu or cuda.
    """
    if device == "cuda":
        major, minor = compute_capability()
        return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"
    fields = first_core()
    name = fields.get("model name") or platform.processor() or platform.machine()
    identity = " ".join(f"{field.removeprefix('cpu ')} {fields[field]}" for field in IDENTITY if field in fields)
    identity = identity.removeprefix("vendor_id ")
    return f"{name} ({', '.join(part for part in (identity, torch.backends.cpu.get_cpu_capability()) if part)})"


def compute_capability() -> tuple[int, int]:
    """Return the current GPU's compute capability, such as (7, 0), which determines its instruction set."""
    return torch.cuda.get_device_capability()


def has_numbers(x: Tensor) -> bool:
    """Return True if x has values; fake and meta tensors, which are used to count costs, have none."""
    return not (x.is_meta or isinstance(x, FakeTensor))
