"""fairseq's optimizers of weights in fp16 or bf16, with exact checkpoints and exact sums; they keep fairseq's names.

fairseq saves the rounded weights alone. Resumed, a run would lose what its updates have added below the 8 bits of
bf16 or the 11 of fp16. Here the fp32 weights are saved too, 4 bytes a parameter, and when the loss scale will grow.

fairseq leaves the sum of an update's gradients to autograd, which adds to ``weight.grad``, and copies it to the fp32
weights' gradient once. In bf16 what a batch adds to the sum of 500 others is below its last bit, and is lost. Here each
batch's gradient is added to the fp32 weights' before the next batch's is computed. That of the last batch processes
average as ever; and then the sums, which nobody else averages. They take no memory that fairseq does not take.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import torch
from fairseq.optim import fp16_optimizer
from torch import Tensor, distributed
from typing_extensions import override

# Batches of an update up to which its sum stays fairseq's: bf16 has lost 0.3% of it by then, and one more exchange
# between processes would cost the more the fewer batches there are.
EXACT_ENOUGH = 8
_SCALER = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


class _ExactState:
    """Of a half-precision optimizer: its state is all that the next update depends on."""

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), "fp32_weights": [weights.data for weights in self._fp32_weights()]}
        if self.scaler is not None:
            state["loss_scaler"] = {name: getattr(self.scaler, name) for name in _SCALER}
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: Optional[dict] = None) -> None:
        """A checkpoint without fp32 weights, of an older version or stock fairseq's, loads as fairseq loads it."""
        state = dict(state_dict)
        saved = state.pop("fp32_weights", None)
        scaler = state.pop("loss_scaler", None)
        super().load_state_dict(state, optimizer_overrides)
        if scaler is not None and self.scaler is not None:
            vars(self.scaler).update(scaler)
        if saved:
            everything = torch.cat([weights.flatten() for weights in saved])
            sizes = [weights.numel() for weights in self._fp32_weights()]  # one vector on a GPU, one each on a CPU
            for weights, part in zip(self._fp32_weights(), everything.split(sizes), strict=True):
                weights.data.copy_(part.view_as(weights))

    def _fp32_weights(self) -> list[torch.nn.Parameter]:
        weights = getattr(self, "fp32_params", ())  # with --memory-efficient-fp16 there are none
        if isinstance(weights, dict):
            return list(weights.values())
        return list(weights)


class MemoryEfficientFP16Optimizer(_ExactState, fp16_optimizer.MemoryEfficientFP16Optimizer):
    """fairseq's, with the loss scaler's whole state."""


class FP16Optimizer(_ExactState, fp16_optimizer.FP16Optimizer):
    """fairseq's, with the fp32 weights in its state, and sums of many batches in fp32.

    Attributes:
        groups_of_sums: while an update sums in fp32, the groups of processes that average: one, or none; else None.
    """

    groups_of_sums: Optional[Sequence[Any]] = None

    @classmethod
    @override
    def build_optimizer(cls, cfg, params, **kwargs):
        """Weights stay apart without a GPU, which joining them needs, and where an update depends on their shapes."""
        has_experts = any(hasattr(weight, "expert") for weight in params)  # a mark, which one vector would lose
        if not torch.cuda.is_available() or cfg.optimizer._name in ("nvlamb", "muon") or has_experts:
            cfg.common.fp16_no_flatten_grads = True
        return super().build_optimizer(cfg, params, **kwargs)

    @contextmanager
    def summing_in_fp32(self, groups: Sequence[Any]) -> Iterator[None]:
        """For one update of several batches."""
        self.groups_of_sums = groups
        try:
            yield
        finally:
            self.groups_of_sums = None

    @override
    def backward(self, loss: Tensor) -> None:
        """Adds the batch before, as the next one would overwrite it."""
        if self.groups_of_sums is not None and self._needs_sync:
            self._add()
        super().backward(loss)

    @override
    def _sync_fp16_grads_to_fp32(self) -> None:
        """Adds the last batch: called once all are through."""
        if self.groups_of_sums is None:
            return super()._sync_fp16_grads_to_fp32()
        if self._needs_sync:
            for group in self.groups_of_sums:
                pairs = self._weights_and_sums()
                _average([sums for weight, sums in pairs if not hasattr(weight, "expert")], group)
            self._add()
            self._needs_sync = False

    def _add(self) -> None:
        """Moves the weights' gradients to the sums."""
        for weight, sums in self._weights_and_sums():
            if weight.grad is not None:
                sums.add_(weight.grad)
                weight.grad = None

    def _weights_and_sums(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each weight in half precision and the gradient of its fp32 copy, which may be a part of one long vector."""
        if not self.has_flat_params:
            pairs = zip(self.fp16_params, self.fp32_params, strict=True)
            yield from ((weight, copy.grad) for weight, copy in pairs)
            return
        for device, vector in self.fp32_params.items():
            weights = [weight for weight in self.fp16_params if weight.requires_grad and weight.device.index == device]
            parts = vector.grad.split([weight.numel() for weight in weights])
            yield from ((weight, part.view_as(weight)) for weight, part in zip(weights, parts, strict=True))


def _average(tensors: list[Tensor], group: Any) -> None:
    under_way = [distributed.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for exchange in under_way:
        exchange.wait()
    torch._foreach_div_(tensors, distributed.get_world_size(group))
