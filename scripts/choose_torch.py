"""Selects the version of torch to install. scripts/setup.sh runs this script with the environment's own Python.

    choose_torch.py installed   print the version of an installed torch that can be kept, if any
    choose_torch.py choose      print the requirement for `pip install`, and the reason on a second line
    choose_torch.py constrain   print the constraints for installing all other packages

An installed torch is never changed. If there is none, pip is asked which version it would install. If that version has
no kernels for the GPUs of this machine, or needs a newer driver, the newest compatible version on PyPI is used instead.
"""

import json
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lazyformer_fairseq.executors import nvidia_smi, torch_builds

# The tested version comes first. The range is for indexes that do not have it.
WISHES = ("torch==2.13.0", "torch>=2.6,<2.14")
TORCHAUDIO_WITHOUT_PIN = "2.11.0"  # the first version that does not pin torch
GPU_PACKAGES = re.compile(r"(nvidia|cuda|triton|pytorch-triton|intel)\b", re.IGNORECASE)


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def fits(version: str) -> bool:
    """Return True if setup.py's bounds allow this version of torch.

    The bounds are hard-coded, because `packaging` may not be installed yet.
    """
    parts = re.match(r"(\d+)\.(\d+)[.\d]*(a|b|rc|dev)?", version)
    if parts is None:
        return False
    return (2, 6, True) <= (int(parts[1]), int(parts[2]), parts[3] is None) < (2, 14)


def pip_report(requirement: str) -> dict | None:
    """Return pip's installation report for a requirement, or None if pip cannot install it."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--report", "-"]
    answer = subprocess.run([*command, requirement], stdout=subprocess.PIPE, text=True)
    return json.loads(answer.stdout) if answer.returncode == 0 else None


def is_cpu_build(torch_metadata: dict) -> bool:
    """Return True if this distribution does not require GPU libraries on this platform."""
    from packaging.requirements import Requirement  # only available in the new environment

    needed = [Requirement(line) for line in torch_metadata.get("requires_dist", [])]
    here = [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return not any(GPU_PACKAGES.match(name) for name in here)


def decide(torch_metadata: dict, gpu: bool, macos: bool) -> tuple[str, str]:
    """Return the requirement to install and the reason, given the version that pip would install and the machine."""
    version = torch_metadata["version"]
    exact = f"torch=={version}"
    if macos:
        return exact, f"torch {version}, the only build for macOS (about a minute)"
    if is_cpu_build(torch_metadata):
        if not gpu:
            return exact, f"torch {version}, a CPU build because there is no GPU (about a minute)"
        release = version.split("+")[0]
        # === compares strings, so a local version such as 2.13.0+cpu is not preferred to 2.13.0.
        return f"torch==={release}", f"torch {release} with CUDA for the GPU, several GB (about 5 minutes)"
    if gpu:
        return exact, f"torch {version} for the GPU, several GB (about 5 minutes)"
    return exact, f"torch {version} with CUDA, several GB, because pip finds no CPU build (about 5 minutes)"


def decide_for_gpus(torch_metadata: dict) -> tuple[str, str]:
    """Return the requirement to install and the reason on a machine with GPUs, which not all builds on PyPI support."""
    there, driver = nvidia_smi.capabilities(), nvidia_smi.driver()
    of_other_index = "+" in torch_metadata["version"] and not is_cpu_build(torch_metadata)
    if of_other_index or platform.machine() != "x86_64":  # not listed in torch_builds
        return decide(torch_metadata, gpu=True, macos=False)
    build = torch_builds.newest_for(there, driver)
    if build is None:
        told = f"capability {torch_builds.in_words(there)}" if there else "unknown capability"
        requirement, what = decide(torch_metadata, gpu=False, macos=False)
        return requirement, f"{what}; torch 2.6 and later do not support driver {driver} with a GPU of {told}"
    if build == torch_builds.BUILDS[0]:
        return decide(torch_metadata, gpu=True, macos=False)
    reason = torch_builds.why(there, driver)
    return f"torch==={build.version}", f"torch {build.version}, {reason}; several GB (about 5 minutes)"


def choose() -> str:
    present = installed_version("torch")
    if present is not None:
        sys.exit(
            f"torch {present} is installed, but a version from 2.6 to 2.13 is required. An installed torch is not "
            "replaced automatically: upgrade it yourself, or use another VENV."
        )
    for wish in WISHES:
        report = pip_report(wish)
        if report is not None:
            offered = report["install"][0]["metadata"]
            if nvidia_smi.gpus_of_machine():
                return "\n".join(decide_for_gpus(offered))
            return "\n".join(decide(offered, gpu=False, macos=platform.system() == "Darwin"))
    sys.exit("pip finds no torch for this Python and platform; check the network and pip's settings")


def installed() -> str | None:
    version = installed_version("torch")
    return version if version is not None and fits(version) else None


def constrain() -> str:
    torchaudio = installed_version("torchaudio") or TORCHAUDIO_WITHOUT_PIN
    return f"torch=={installed_version('torch')}\ntorchaudio=={torchaudio}"


if __name__ == "__main__":
    answer = {"installed": installed, "choose": choose, "constrain": constrain}[sys.argv[1]]()
    if answer is not None:
        print(answer)
