"""Identifies the processor or GPU, precisely enough that measurements on one hold for the next one like it."""

import functools
import platform

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lazyformer_fairseq.executors.cpuinfo import first_core

# What tells a processor from others sold under its name; ARM's have the last two.
IDENTITY = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")


@functools.cache
def device_key(device: str) -> str:
    """Return the key of measurements of speed.

    A GPU's name and compute capability. A processor's trade name, which may be as vague as "AMD EPYC", its maker,
    family and model where Linux reports them, and the vector instructions that torch uses.

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
    """Return that of the GPU in use, as (7, 0): which of NVIDIA's instructions it has."""
    return torch.cuda.get_device_capability()


def has_numbers(x: Tensor) -> bool:
    """Return whether x has numbers that one may read; fake and meta tensors, by which costs are counted, have none."""
    return not (x.is_meta or isinstance(x, FakeTensor))
