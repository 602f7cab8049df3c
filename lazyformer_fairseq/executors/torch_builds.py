"""Builds of torch and the GPUs they have kernels for: PyPI's for Linux on x86-64, the choice, and the one installed.

torch itself is imported late: scripts/choose_torch.py runs this before there is one. nvidia-smi tells of the GPUs, so
that CUDA does not start here: who asks may have to fork.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors import nvidia_smi
from lazyformer_fairseq.executors.nvidia_smi import Capability


@dataclass(frozen=True)
class Build:
    """A torch of PyPI.

    Attributes:
        version: the last one of its minor version.
        cuda: the version that it is built with, ``torch.version.cuda``.
        architectures: what its kernels are compiled for, ``torch._C._cuda_getArchFlags()``.
    """

    version: str
    cuda: str
    architectures: tuple[str, ...]


MAXWELL_TO_HOPPER = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
VOLTA_TO_BLACKWELL = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
TURING_TO_BLACKWELL = VOLTA_TO_BLACKWELL[1:]
# Newest first, from the version that the project is tried with down to the lowest that setup.py allows; read in the
# wheels for Python 3.11. They agree with the matrix "PyTorch CUDA Support" in RELEASE.md of PyTorch, which says of
# builds that are not on PyPI: those with CUDA 12.6 keep Maxwell to Volta.
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
# Release of the driver by major version of CUDA: NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1.
LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}


def has_kernels(capability: Capability, architectures: Iterable[str]) -> bool:
    """Return whether a GPU runs what is compiled for one of `architectures`.

    A binary, ``sm_80``, runs on GPUs of the same major version and no lower minor one; code that the driver compiles,
    ``compute_80``, on all later GPUs (NVIDIA, CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility").
    Those with a letter, ``sm_90a``, run on exactly this GPU.
    """
    return any(_runs(capability, *architecture.partition("_")[::2]) for architecture in architectures)


def _runs(capability: Capability, compiled_for: str, version: str) -> bool:
    digits = version.rstrip("af")
    compiled = (int(digits[:-1]), int(digits[-1]))
    if digits != version:
        return capability == compiled
    return capability >= compiled and (compiled_for == "compute" or capability[0] == compiled[0])


def can_run(driver: Optional[int], cuda: str) -> bool:
    """Return whether a driver of this release runs a torch of this CUDA version; an unknown one is taken to."""
    return driver is None or driver >= LEAST_DRIVER.get(cuda.partition(".")[0], 0)


def newest_for(capabilities: Sequence[Capability], driver: Optional[int] = None) -> Optional[Build]:
    """Return the newest build that this driver runs and that has kernels for all of these GPUs; if none has, for most.

    Where the driver says nothing of the GPUs (`capabilities` is empty) it alone decides. None where no build has
    kernels for any.
    """

    def served(build: Build) -> int:
        return sum(has_kernels(capability, build.architectures) for capability in capabilities)

    found = max((build for build in BUILDS if can_run(driver, build.cuda)), key=served, default=None)
    if found and (served(found) or not capabilities):
        return found
    return None


def why(capabilities: Sequence[Capability], driver: Optional[int]) -> str:
    """Return in words what :func:`newest_for` looked at."""
    kernels = ""
    if capabilities:
        kernels = f" with kernels for compute capability {in_words(capabilities)}"
    return f"the newest on PyPI{kernels} that runs with driver {driver}"


def in_words(capabilities: Iterable[Capability]) -> str:
    """Return ``7.0 and 8.0``."""
    return " and ".join(f"{major}.{minor}" for major, minor in sorted(set(capabilities)))


def refuse_unfit_torch(processes: int = 1) -> None:
    """Raise a UserError where torch cannot use as many of the GPUs that it will see as there are processes here."""
    if misfit := misfit_of_torch(processes):
        raise UserError(f"{misfit}. To use the processor all the same, set CUDA_VISIBLE_DEVICES to nothing")


def misfit_of_torch(processes: int = 1) -> Optional[str]:
    """Return why torch cannot use that many GPUs, and what to install; None where it can, and where there is no GPU.

    With GPUs of several types nobody knows here which ones torch will see: enough of them have to do.
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
        needed = f"{name} is built with CUDA {torch.version.cuda}, which needs NVIDIA's driver from {least} on"
        return f"{needed}, and here is {driver}: update the driver, or {_remedy(there, driver)}"
    compiled = (torch._C._cuda_getArchFlags() or "").split()
    lacking = [capability for capability in there if not has_kernels(capability, compiled)]
    if len(there) - len(lacking) >= min(processes, visible, len(there)):
        return None
    return (
        f"{name} has no kernels for GPUs of compute capability {in_words(lacking)}, but for {' '.join(compiled)}: "
        f"{_remedy(there, driver)}"
    )


def _remedy(there: list[Capability], driver: Optional[int]) -> str:
    build = newest_for(there, driver)
    reason = why(there, driver)
    if build:
        return f"pip install torch==={build.version}, {reason}"
    return "no torch from 2.6 on can use them"


if __name__ == "__main__":
    if misfit := misfit_of_torch(nvidia_smi.count_gpus()):  # one that cannot be used is worth a line
        print(misfit)
