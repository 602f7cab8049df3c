"""PyTorch builds on PyPI for Linux x86-64, the GPUs that their kernels support, and the selection of a build.

torch itself is imported late, because scripts/choose_torch.py uses this module before torch is installed. Information
about GPUs comes from nvidia-smi, so that CUDA is not initialized in a process that may have to fork.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors import nvidia_smi
from lazyformer_fairseq.executors.nvidia_smi import Capability


@dataclass(frozen=True)
class Build:
    """A build of torch on PyPI.

    Attributes:
        version: the build's version, which is the latest patch release of a minor version.
        cuda: the CUDA version that it is built with, ``torch.version.cuda``.
        architectures: the architectures that its kernels are compiled for, ``torch._C._cuda_getArchFlags()``.
    """

    version: str
    cuda: str
    architectures: tuple[str, ...]


MAXWELL_TO_HOPPER = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
VOLTA_TO_BLACKWELL = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
TURING_TO_BLACKWELL = VOLTA_TO_BLACKWELL[1:]
# Newest first, from the version that this project is tested with down to the lowest that setup.py allows. The values
# were read from the wheels for Python 3.11, and agree with the "PyTorch CUDA Support" matrix in PyTorch's RELEASE.md.
# According to that matrix, builds with CUDA 12.6, which are not on PyPI, still support Maxwell to Volta.
BUILDS = (
    Build("2.13.0", "13.0", TURING_TO_BLACKWELL),
    Build("2.12.1", "13.0", TURING_TO_BLACKWELL),
    Build("2.11.0", "13.0", TURING_TO_BLACKWELL),
    Build("2.10.0", "12.8", VOLTA_TO_BLACKWELL),
    Build("2.9.1", "12.8", VOLTA_TO_BLACKWELL),
    Build("2.8.0", "12.8", VOLTA_TO_BLACKWELL),
    Build("2.7.1", "12.6", MAXWELL_TO_HOPPER),
    Build("2.6.0", "12.4", MAXWELL_TO_HOPPER),
)
# The lowest major version of the driver for each major version of CUDA, from NVIDIA, CUDA Compatibility, "Minor Version
# Compatibility", table 1.
LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}


def has_kernels(capability: Capability, architectures: Iterable[str]) -> bool:
    """Return whether a GPU can run kernels that are compiled for any of `architectures`.

    A binary such as ``sm_80`` runs on GPUs with the same major and the same or a higher minor version. Code that the
    driver compiles, such as ``compute_80``, also runs on all later GPUs (NVIDIA, CUDA C++ Programming Guide, "Binary
    Compatibility", "PTX Compatibility"). An architecture with a letter, such as ``sm_90a``, runs only on that
    architecture.
    """
    for architecture in architectures:
        compiled_for, _, version = architecture.partition("_")
        if _runs(capability, compiled_for, version):
            return True
    return False


def _runs(capability: Capability, compiled_for: str, version: str) -> bool:
    digits = version.rstrip("af")
    compiled = (int(digits[:-1]), int(digits[-1]))
    if digits != version:
        return capability == compiled
    return capability >= compiled and (compiled_for == "compute" or capability[0] == compiled[0])


def can_run(driver: Optional[int], cuda: str) -> bool:
    """Return whether a driver of this major version supports a version of CUDA; True if the driver is unknown."""
    return driver is None or driver >= LEAST_DRIVER.get(cuda.partition(".")[0], 0)


def newest_for(capabilities: Sequence[Capability], driver: Optional[int] = None) -> Optional[Build]:
    """Return the newest build among those that run with this driver and have kernels for the most of these GPUs.

    If the GPUs' capabilities are unknown (`capabilities` is empty), only the driver is considered. If no build has
    kernels for any of the GPUs, the result is None.
    """

    def served(build: Build) -> int:
        return sum(has_kernels(capability, build.architectures) for capability in capabilities)

    runnable = [build for build in BUILDS if can_run(driver, build.cuda)]
    found = max(runnable, key=served, default=None)
    if found and (served(found) or not capabilities):
        return found
    return None


def why(capabilities: Sequence[Capability], driver: Optional[int]) -> str:
    """Describe the criteria of :func:`newest_for`."""
    kernels = ""
    if capabilities:
        kernels = f" with kernels for compute capability {in_words(capabilities)}"
    return f"the newest on PyPI{kernels} that runs with driver {driver}"


def in_words(capabilities: Iterable[Capability]) -> str:
    """Format compute capabilities, as in ``7.0 and 8.0``."""
    return " and ".join(f"{major}.{minor}" for major, minor in sorted(set(capabilities)))


def refuse_unfit_torch(processes: int = 1) -> None:
    """Raise a UserError if torch cannot use as many GPUs as there are processes on this machine."""
    if misfit := torch_incompatibility(processes):
        raise UserError(f"{misfit}. To use the CPU instead, set CUDA_VISIBLE_DEVICES to an empty value")


def torch_incompatibility(processes: int = 1) -> Optional[str]:
    """Explain why torch cannot use that many GPUs, and what to install; return None if it can or there is no GPU.

    If there are several types of GPUs, it is unknown which of them torch will see; it suffices that enough of them
    work.
    """
    visible = nvidia_smi.count_gpus()
    if not visible:
        return None
    import torch

    there = nvidia_smi.capabilities()
    driver = nvidia_smi.driver()
    name = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        return f"{name} is a build without CUDA, but this machine has {visible} GPU(s): {_remedy(there, driver)}"
    if not can_run(driver, torch.version.cuda):
        least = LEAST_DRIVER[torch.version.cuda.partition(".")[0]]
        needed = f"{name} is built with CUDA {torch.version.cuda}, which requires NVIDIA driver {least} or later"
        return f"{needed}, but this machine has {driver}: update the driver, or {_remedy(there, driver)}"
    compiled = (torch._C._cuda_getArchFlags() or "").split()
    lacking = [capability for capability in there if not has_kernels(capability, compiled)]
    if len(there) - len(lacking) >= min(processes, visible, len(there)):
        return None
    return (
        f"{name} has no kernels for GPUs of compute capability {in_words(lacking)}, only for {' '.join(compiled)}: "
        f"{_remedy(there, driver)}"
    )


def _remedy(there: list[Capability], driver: Optional[int]) -> str:
    build = newest_for(there, driver)
    reason = why(there, driver)
    if build:
        return f"pip install torch==={build.version}, {reason}"
    return "no build of torch 2.6 or later can use them"


if __name__ == "__main__":
    if misfit := torch_incompatibility(nvidia_smi.count_gpus()):  # even a single GPU that cannot be used is reported
        print(misfit)
