"""fairseq's optimizer of weights in fp16 or bf16, with exact checkpoints and exact sums; it keeps fairseq's name.

fairseq saves the rounded weights alone. Resumed, a run would lose what its updates have added below the 8 bits of
bf16 or the 11 of fp16. Here the fp32 weights are saved too, 4 bytes per parameter, and when the loss scale will grow.

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
SCALER_STATE = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


class FP16Optimizer(fp16_optimizer.FP16Optimizer):
    """fairseq's, with all that the next update depends on in its state, and sums of many batches in fp32.

    Attributes:
        groups_of_sums: while an update sums in fp32, the groups of processes that average: one, or none; else None.
    """

    groups_of_sums: Optional[Sequence[Any]] = None

    @classmethod
    @override
    def build_optimizer(cls, cfg, params, **kwargs):
        """Keep weights apart, where fairseq joins them to one vector in fp16 on a GPU: their shapes matter."""
        cfg.common.fp16_no_flatten_grads = True
        return super().build_optimizer(cfg, params, **kwargs)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Add the fp32 weights and the loss scaler."""
        state = {**super().state_dict(), "fp32_weights": [weights.data for weights in self.fp32_params]}
        if self.scaler is not None:
            state["loss_scaler"] = {name: getattr(self.scaler, name) for name in SCALER_STATE}
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: Optional[dict] = None) -> None:
        """Load both; a checkpoint of stock fairseq's, which lacks them, loads as fairseq loads it."""
        state = dict(state_dict)
        saved = state.pop("fp32_weights", None)
        scaler = state.pop("loss_scaler", None)
        super().load_state_dict(state, optimizer_overrides)
        if scaler is not None and self.scaler is not None:
            vars(self.scaler).update(scaler)
        if saved:
            for weights, saved_weights in zip(self.fp32_params, saved, strict=True):
                weights.data.copy_(saved_weights)

    @contextmanager
    def summing_in_fp32(self, groups: Sequence[Any]) -> Iterator[None]:
        """Sum in fp32 within the block, one update of several batches."""
        self.groups_of_sums = groups
        try:
            yield
        finally:
            self.groups_of_sums = None

    @override
    def backward(self, loss: Tensor) -> None:
        """Add the batch before to the sums, as this one would overwrite it."""
        if self.groups_of_sums is not None and self._needs_sync:
            self._add()
        super().backward(loss)

    @override
    def _sync_fp16_grads_to_fp32(self) -> None:
        """Add the last batch: fairseq calls this once all are through."""
        if self.groups_of_sums is None:
            super()._sync_fp16_grads_to_fp32()
        elif self._needs_sync:
            for group in self.groups_of_sums:
                self._average(group)
            self._add()
            self._needs_sync = False

    def _average(self, group: Any) -> None:
        """Average the sums over the group's processes, but those of experts, which each process has to itself."""
        pairs = zip(self.fp16_params, self.fp32_params, strict=True)
        sums = [copy.grad for weight, copy in pairs if not hasattr(weight, "expert")]
        under_way = [distributed.all_reduce(tensor, group=group, async_op=True) for tensor in sums]
        for exchange in under_way:
            exchange.wait()
        torch._foreach_div_(sums, distributed.get_world_size(group))

    def _add(self) -> None:
        """Move the weights' gradients to the sums."""
        for weight, copy in zip(self.fp16_params, self.fp32_params, strict=True):
            if weight.grad is not None:
                copy.grad.add_(weight.grad)
                weight.grad = None
