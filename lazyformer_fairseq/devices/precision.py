"""The precision that a device trains in unless told otherwise. ``python -m`` prints it."""

from collections.abc import Collection

from lazyformer_fairseq.devices.nvidia_smi import Capability, capabilities, count_gpus

# NVIDIA, CUDA C++ Programming Guide, table of features by compute capability: Ampere's tensor cores were the first with
# bfloat16. Older GPUs emulate it, slowly, and torch.cuda.is_bf16_supported() is true of them.
LEAST_WITH_BF16 = (8, 0)


def precision_of(found: Collection[Capability]) -> str:
    """Of GPUs of these compute capabilities: bf16 where all have it, else fp16; fp16 too where none is known."""
    return "bf16" if found and min(found) >= LEAST_WITH_BF16 else "fp16"


def precision_here() -> str:
    """Of this machine, by nvidia-smi, so that neither torch nor CUDA starts: fp32 where torch will see no GPU."""
    return precision_of(capabilities()) if count_gpus() else "fp32"


def precision_on(device: str) -> str:
    """Of ``cpu`` (fp32) or of the GPU that torch uses, ``cuda``."""
    if device == "cpu":
        return "fp32"
    import torch

    return precision_of([torch.cuda.get_device_capability()])


if __name__ == "__main__":
    print(precision_here())
