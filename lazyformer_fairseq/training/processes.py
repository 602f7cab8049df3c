"""The distributed processes of a run under torchrun, and sums over them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn


@dataclass(frozen=True)
class Processes:
    """This process's rank and the number of processes that contribute to each update.

    Attributes:
        rank: the index of this process; process 0 writes checkpoints and records.
        count: the number of processes.
    """

    rank: int = 0
    count: int = 1

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place, and return it."""
        if self.count > 1:
            distributed.all_reduce(values)
        return values

    def sum_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Sum gradients over all processes with one all-reduce per dtype; missing gradients count as zeros."""
        if self.count == 1:
            return
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        for dtype in dict.fromkeys(weight.dtype for weight in weights):
            gradients = [weight.grad for weight in weights if weight.grad is not None and weight.dtype == dtype]
            message = torch.cat([gradient.flatten() for gradient in gradients])
            distributed.all_reduce(message)
            parts = message.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


ALONE = Processes()


def join_processes(device: str) -> Processes:
    """Join the process group if this process was started by torchrun.

    On GPUs, each process uses the device of its local rank, and the back end is NCCL. On CPUs, the back end is gloo.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    if not distributed.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return ALONE
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    return Processes(distributed.get_rank(), distributed.get_world_size())
