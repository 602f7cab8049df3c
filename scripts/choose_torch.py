"""Decides which torch an environment gets; scripts/setup.sh runs this with that environment's own Python.

    choose_torch.py installed   prints the version of a torch that can be kept; nothing if there is none
    choose_torch.py choose      prints what to give to `pip install`, and on a second line why
    choose_torch.py constrain   prints the constraints under which everything else is installed

A torch that is there is never touched. Where there is none, pip itself is asked what it would install; where that has
no kernels for the GPUs of this machine, or needs a newer driver, PyPI's newest that fits them is taken in its place.
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

# The version that was tried comes first; the range is for an index that does not have it.
WISHES = ("torch==2.13.0", "torch>=2.6,<2.14")
TORCHAUDIO_WITHOUT_PIN = "2.11.0"  # the first that runs beside any torch, as far as pip is concerned
GPU_PACKAGES = re.compile(r"(nvidia|cuda|triton|pytorch-triton|intel)\b", re.IGNORECASE)


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def fits(version: str) -> bool:
    """Whether setup.py's bounds on torch allow this version. Written out, as a bare Python has no `packaging`."""
    parts = re.match(r"(\d+)\.(\d+)[.\d]*(a|b|rc|dev)?", version)
    if parts is None:
        return False
    return (2, 6, True) <= (int(parts[1]), int(parts[2]), parts[3] is None) < (2, 14)


def pip_report(requirement: str) -> dict | None:
    """What `pip install` would do for one requirement, by pip's own installation report; None if it cannot."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--report", "-"]
    answer = subprocess.run([*command, requirement], stdout=subprocess.PIPE, text=True)
    return json.loads(answer.stdout) if answer.returncode == 0 else None


def is_cpu_build(torch_metadata: dict) -> bool:
    """Whether this distribution asks for no GPU libraries on this platform."""
    from packaging.requirements import Requirement  # only in the environment that is being filled

    needed = [Requirement(line) for line in torch_metadata.get("requires_dist", [])]
    here = [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return not any(GPU_PACKAGES.match(name) for name in here)


def decide(torch_metadata: dict, gpu: bool, macos: bool) -> tuple[str, str]:
    """From what pip would install and the machine: (what to install, why)."""
    version = torch_metadata["version"]
    exact = f"torch=={version}"
    if macos:
        return exact, f"torch {version}, the only build for macOS (about a minute)"
    if is_cpu_build(torch_metadata):
        if not gpu:
            return exact, f"torch {version}, a CPU build as there is no GPU (about a minute)"
        release = version.split("+")[0]
        # === compares the text, so that a local version such as 2.13.0+cpu does not win over 2.13.0.
        return f"torch==={release}", f"torch {release} with CUDA for the GPU, several GB (about 5 minutes)"
    if gpu:
        return exact, f"torch {version} for the GPU, several GB (about 5 minutes)"
    return exact, f"torch {version} with CUDA, several GB, as pip sees no CPU build (about 5 minutes)"


def decide_for_gpus(torch_metadata: dict) -> tuple[str, str]:
    """The same on a machine with GPUs: PyPI's builds are not all compiled for them."""
    there, driver = nvidia_smi.capabilities(), nvidia_smi.driver()
    of_other_index = "+" in torch_metadata["version"] and not is_cpu_build(torch_metadata)
    if of_other_index or platform.machine() != "x86_64":  # torch_builds knows nothing of them
        return decide(torch_metadata, gpu=True, macos=False)
    build = torch_builds.newest_for(there, driver)
    if build is None:
        told = f"capability {torch_builds.in_words(there)}" if there else "a capability that it does not tell"
        requirement, what = decide(torch_metadata, gpu=False, macos=False)
        return requirement, f"{what}; no torch from 2.6 on runs with driver {driver} on a GPU of {told}"
    if build == torch_builds.BUILDS[0]:
        return decide(torch_metadata, gpu=True, macos=False)
    reason = torch_builds.why(there, driver)
    return f"torch==={build.version}", f"torch {build.version}, {reason}; several GB (about 5 minutes)"


def choose() -> str:
    present = installed_version("torch")
    if present is not None:
        sys.exit(
            f"There is a torch {present}, but one from 2.6 to 2.13 is needed. A torch that is there is not replaced "
            "unasked: upgrade it yourself, or give another VENV."
        )
    for wish in WISHES:
        report = pip_report(wish)
        if report is not None:
            offered = report["install"][0]["metadata"]
            if nvidia_smi.gpus_of_machine():
                return "\n".join(decide_for_gpus(offered))
            return "\n".join(decide(offered, gpu=False, macos=platform.system() == "Darwin"))
    sys.exit("pip finds no torch for this Python and platform: are the network and pip's own settings right?")


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
