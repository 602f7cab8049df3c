"""Adds the gradients of an update's batches in single precision, where fairseq adds them in the weights' fp16 or bf16.

fairseq leaves the sum to autograd, which adds to ``weight.grad``, and copies it to the fp32 weights' gradient once. In
bf16 what a batch adds to the sum of 500 others is below its last bit, and is lost. Here each batch's gradient is added
to the fp32 weights' before the next batch's is computed. That of the last batch processes average as ever; and then the
sums, which nobody else averages. They take no memory that fairseq does not take.
"""

from collections.abc import Iterator

import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer
from torch import Tensor, distributed

from lazyformer_fairseq.fairseq_plugin.reliability.bad_updates.skipping import is_guarded

# Batches of an update up to which its sum stays fairseq's: bf16 has lost 0.3% of it by then, and one more exchange
# between processes would cost the more the fewer batches there are.
EXACT_ENOUGH = 8


def adding_many_in_fp32(train_step, self, samples, *args, **kwargs):
    """For ``Trainer.train_step``."""
    if len(samples) <= EXACT_ENOUGH or type(self.optimizer) is not FP16Optimizer or not is_guarded(self):
        return train_step(self, samples, *args, **kwargs)
    self.optimizer.groups_of_sums = [self.data_parallel_process_group] if self.data_parallel_world_size > 1 else []
    try:
        return train_step(self, samples, *args, **kwargs)
    finally:
        del self.optimizer.groups_of_sums


def adding_the_batch_before(backward, self, loss):
    """For ``FP16Optimizer.backward``."""
    if hasattr(self, "groups_of_sums") and self._needs_sync:
        _add(self)
    backward(self, loss)


def adding_the_last_batch(sync, self):
    """For ``FP16Optimizer._sync_fp16_grads_to_fp32``: what is called once all batches are through."""
    if not hasattr(self, "groups_of_sums"):
        return sync(self)
    if self._needs_sync:
        for group in self.groups_of_sums:
            _average([sums for _, sums in _weights_and_sums(self)], group)
        _add(self)
        self._needs_sync = False


def _add(optimizer: FP16Optimizer) -> None:
    """Moves the weights' gradients to the sums."""
    for weight, sums in _weights_and_sums(optimizer):
        if weight.grad is not None:
            sums.add_(weight.grad)
            weight.grad = None


def _weights_and_sums(optimizer: FP16Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Each weight in half precision and the gradient of its fp32 copy, which may be a part of one long vector."""
    if not optimizer.has_flat_params:
        pairs = zip(optimizer.fp16_params, optimizer.fp32_params, strict=True)
        yield from ((weight, copy.grad) for weight, copy in pairs)
        return
    for device, vector in optimizer.fp32_params.items():
        weights = [weight for weight in optimizer.fp16_params if weight.requires_grad and weight.device.index == device]
        parts = vector.grad.split([weight.numel() for weight in weights])
        yield from ((weight, part.view_as(weight)) for weight, part in zip(weights, parts, strict=True))


def _average(tensors: list[Tensor], group) -> None:
    under_way = [distributed.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for exchange in under_way:
        exchange.wait()
    torch._foreach_div_(tensors, distributed.get_world_size(group))
