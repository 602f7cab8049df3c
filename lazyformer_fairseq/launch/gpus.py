"""The GPUs of this machine, by nvidia-smi: torch takes seconds to import. ``python -m`` prints their number."""

import os
import subprocess


def count_gpus() -> int:
    """Those that torch will see: nvidia-smi knows nothing of CUDA_VISIBLE_DEVICES."""
    listed = sum(line.startswith("GPU") for line in _ask("-L"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed if not listed or visible is None else len(list(filter(None, visible.split(","))))


def have_bf16() -> bool:
    """Whether all have it: it came with compute capability 8.0. Old drivers cannot tell; then they have not."""
    try:
        capabilities = [float(line) for line in _ask("--query-gpu=compute_cap", "--format=csv,noheader")]
    except ValueError:
        return False
    return min(capabilities, default=0.0) >= 8


def _ask(*options: str) -> list[str]:
    try:
        answer = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True)
    except OSError:
        return []
    return answer.stdout.splitlines() if answer.returncode == 0 else []


if __name__ == "__main__":
    print(count_gpus())
