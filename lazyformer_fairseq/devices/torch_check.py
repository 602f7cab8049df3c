"""Whether the torch that is installed can use the GPUs of this machine, asked before anything trains.

nvidia-smi tells of the GPUs, so that CUDA does not start here: who asks may have to fork.
"""

from typing import Optional

import torch

from lazyformer_fairseq.devices import nvidia_smi
from lazyformer_fairseq.devices.torch_builds import LEAST_DRIVER, can_run, has_kernels, in_words, newest_for, why
from lazyformer_fairseq.errors import UserError


def refuse_unfit_torch(processes: int = 1) -> None:
    """Raises a UserError where torch cannot use as many of the GPUs that it will see as there are processes here."""
    if misfit := misfit_of_torch(processes):
        raise UserError(f"{misfit}. To use the processor all the same, set CUDA_VISIBLE_DEVICES to nothing")


def misfit_of_torch(processes: int = 1) -> Optional[str]:
    """Why torch cannot use that many GPUs, and what to install; None where it can, and where there is no GPU.

    Of GPUs of several kinds nobody knows here which ones torch will see: enough of them have to do.
    """
    visible = nvidia_smi.count_gpus()
    if not visible:
        return None
    there, driver = nvidia_smi.capabilities(), nvidia_smi.driver()
    name = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        return f"{name} is a build without CUDA, but this machine has {visible} GPU(s): {_remedy(there, driver)}"
    if not can_run(driver, torch.version.cuda):
        least = LEAST_DRIVER[torch.version.cuda.partition(".")[0]]
        needed = f"{name} is built with CUDA {torch.version.cuda}, which needs NVIDIA's driver from {least} on"
        return f"{needed}, and here is {driver}: update the driver, or {_remedy(there, driver)}"
    compiled = torch._C._cuda_getArchFlags().split()
    lacking = [capability for capability in there if not has_kernels(capability, compiled)]
    if len(there) - len(lacking) >= min(processes, visible, len(there)):
        return None
    return (
        f"{name} has no kernels for GPUs of compute capability {in_words(lacking)}, but for {' '.join(compiled)}: "
        f"{_remedy(there, driver)}"
    )


def _remedy(there: list[nvidia_smi.Capability], driver: Optional[int]) -> str:
    build = newest_for(there, driver)
    if build is None:
        return "no torch from 2.6 on can use them"
    return f"pip install torch==={build.version}, {why(there, driver)}"


if __name__ == "__main__":
    if misfit := misfit_of_torch(nvidia_smi.count_gpus()):  # one that cannot be used is worth a line
        print(misfit)
