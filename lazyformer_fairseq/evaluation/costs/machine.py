"""Descriptions of the machine and the software versions used for a measurement."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Optional

import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.torch_builds import torch_incompatibility
from lazyformer_fairseq.extras import versions
from lazyformer_fairseq.modules.processor import device_key

logger = logging.getLogger(__name__)

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_named(name: Optional[str]) -> str:
    """Return the device selected by ``--device``, cpu or cuda; None and "auto" select cuda if a GPU is available.

    Raises:
        UserError: there is no GPU, or torch has no kernels for it.
    """
    if name == "cpu":
        return name
    has_gpu = torch.cuda.is_available()
    torch_mismatch = torch_incompatibility()
    if name == "cuda" and not has_gpu:
        raise UserError(f"--device cuda: torch finds no GPU here{(torch_mismatch and f': {torch_mismatch}') or ''}")
    if has_gpu and torch_mismatch:
        raise UserError(f"{torch_mismatch}. To use the CPU instead, pass --device cpu")
    if torch_mismatch:
        logger.warning("the CPU is used: %s", torch_mismatch)
    if has_gpu:
        return "cuda"
    return "cpu"


def describe_machine(device: torch.device | str) -> dict[str, str | int]:
    """Return the CPU's name and the number of threads, or the GPU's name and the CUDA version."""
    if torch.device(device).type == "cuda":
        return {"device": device_key("cuda"), "cuda": str(torch.version.cuda)}
    return {"device": device_key("cpu"), "threads": torch.get_num_threads()}


def short_device_name(device: str) -> str:
    """Shorten a device name from :func:`describe_machine` for titles, omitting family, model and instruction sets."""
    return device.partition(" (")[0]


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and the packages that affect measurements."""
    return versions(("torch", "fairseq-fixed", "numpy", "triton", "transformers"))


def record(settings: Any, command: Sequence[str]) -> dict[str, Any]:
    """Return a result's header: command, machine, versions and settings (a dataclass with a field `device`)."""
    machine = {"machine": describe_machine(settings.device), "versions": describe_versions()}
    return {"command": " ".join(command), **machine, "settings": asdict(settings)}
