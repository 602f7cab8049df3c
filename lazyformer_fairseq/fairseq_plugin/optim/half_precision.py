"""A subclass of fairseq's half-precision optimizer that adds exact checkpoints and fp32 gradient accumulation.

It has the same name as fairseq's class.

Checkpoints: fairseq saves only the rounded weights, so a resumed run loses the parts of its updates that lie below the
8 significant bits of bf16 or the 11 of fp16. This class also saves the fp32 weights (4 bytes per parameter) and the
counters that determine when the loss scale grows.

Gradient accumulation: fairseq has autograd accumulate an update's gradients in ``weight.grad``, and copies the sum to
the fp32 weights' gradients once. In bf16, one batch's contribution to the sum of 500 others lies below the last bit
and is lost. This class adds each batch's gradient to the fp32 weights' gradients before it computes the next one. The
last batch's gradient is averaged over processes as usual, and this class averages the fp32 sums of the earlier
batches. It uses no more memory than fairseq.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import torch
from fairseq.optim import fp16_optimizer
from torch import Tensor, distributed
from typing_extensions import override

# Up to this number of batches per update, we keep fairseq's sum: bf16 loses at most 0.3% of it, and with few batches
# the additional all-reduce costs relatively more.
EXACT_ENOUGH = 8
SCALER_STATE = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


class FP16Optimizer(fp16_optimizer.FP16Optimizer):
    """fairseq's half-precision optimizer with a complete state dict and gradient accumulation in fp32.

    Attributes:
        fp32_sum_groups: the process groups to average over while an update accumulates in fp32 (one group, or an empty
            sequence for a single process); None otherwise.
    """

    fp32_sum_groups: Optional[Sequence[Any]] = None

    @classmethod
    @override
    def build_optimizer(cls, cfg, params, **kwargs):
        """Build the optimizer without letting fairseq flatten a GPU's fp16 weights into a vector without shapes."""
        cfg.common.fp16_no_flatten_grads = True
        return super().build_optimizer(cfg, params, **kwargs)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return fairseq's state plus the fp32 weights and the loss scaler's counters."""
        state = {**super().state_dict(), "fp32_weights": [weights.data for weights in self.fp32_params]}
        if self.scaler is not None:
            state["loss_scaler"] = {name: getattr(self.scaler, name) for name in SCALER_STATE}
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: Optional[dict] = None) -> None:
        """Load the state; checkpoints from stock fairseq, which lack the additional parts, are loaded as in fairseq."""
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
        """Accumulate gradients in fp32 within a ``with`` block that spans one update of several batches.

        Args:
            groups: the process groups to average over; see :attr:`fp32_sum_groups`.
        """
        self.fp32_sum_groups = groups
        try:
            yield
        finally:
            self.fp32_sum_groups = None

    @override
    def backward(self, loss: Tensor) -> None:
        """Add the previous batch's gradient to the sums, then compute this batch's gradient."""
        if self.fp32_sum_groups is not None and self._needs_sync:
            self._add()
        super().backward(loss)

    @override
    def _sync_fp16_grads_to_fp32(self) -> None:
        """Average the sums over processes and add the last batch's gradient; fairseq calls this after all batches."""
        if self.fp32_sum_groups is None:
            super()._sync_fp16_grads_to_fp32()
        elif self._needs_sync:
            for group in self.fp32_sum_groups:
                self._average(group)
            self._add()
            self._needs_sync = False

    def _average(self, group: Any) -> None:
        """Average the sums over a process group, except the experts' sums, because each process has its own experts."""
        pairs = zip(self.fp16_params, self.fp32_params, strict=True)
        sums = [copy.grad for weight, copy in pairs if not hasattr(weight, "expert")]
        under_way = [distributed.all_reduce(tensor, group=group, async_op=True) for tensor in sums]
        for exchange in under_way:
            exchange.wait()
        torch._foreach_div_(sums, distributed.get_world_size(group))

    def _add(self) -> None:
        """Add the weights' gradients to the sums and clear the gradients."""
        for weight, copy in zip(self.fp16_params, self.fp32_params, strict=True):
            if weight.grad is not None:
                copy.grad.add_(weight.grad)
                weight.grad = None
