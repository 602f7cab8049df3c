"""Gradients on their way from a model's weights to its optimizer, in the arithmetic of fairseq's trainer.

Weights in half precision have copies in single precision, which the optimizer updates; in fp16 the loss is scaled, so
that small gradients do not vanish (Micikevicius et al., 2018, "Mixed Precision Training", sections 3.1 and 3.2).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

import torch
from torch import Tensor, nn

Share = Union[float, Tensor]


class Weights:
    """A model's weights in single precision.

    Attributes:
        own: the weights of the model.
        updated: the weights that the optimizer updates.
    """

    def __init__(self, weights: Iterable[nn.Parameter]):
        self.own = self.updated = [weight for weight in weights if weight.requires_grad]

    def clear(self) -> None:
        """Forget all gradients."""
        for weight in (*self.own, *self.updated):
            weight.grad = None

    def backward(self, loss: Tensor) -> None:
        """Compute gradients."""
        loss.backward()

    def clip(self, share: Share, most: float, groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """Multiply gradients by a share and clip them; return their norm before clipping.

        Args:
            share: the share of each gradient that counts.
            most: the largest norm; 0 for any.
            groups: the optimizer's groups, which have the weights in the order in which they are summed.
        """
        gradients = gradients_of(groups)
        torch._foreach_mul_(gradients, share)
        norm = norm_of(gradients)
        if most > 0:
            torch._foreach_mul_(gradients, (most / (norm + 1e-6)).clamp_(max=1))
        return norm

    def lower_scale(self) -> bool:
        """Lower the loss scale after a gradient that is not finite; return whether that may have helped."""
        return False

    def write_back(self) -> None:
        """Copy updated weights to the model, after the optimizer's step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints keep beside the optimizer's own state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this out of an optimizer's state."""


class HalfWeights(Weights):
    """A model's weights in bf16 or fp16, with copies in single precision that the optimizer updates.

    Args:
        weights: the model's weights.
        scales: scale the loss.
    """

    def __init__(self, weights: Iterable[nn.Parameter], scales: bool):
        super().__init__(weights)
        self.updated = [nn.Parameter(weight.detach().float()) for weight in self.own]
        for weight, copy in zip(self.own, self.updated, strict=True):
            vars(copy).update(vars(weight))  # Muon's marks
        self.scale = LossScale() if scales else None

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of the scaled loss."""
        if self.scale is not None:
            loss = self.scale.value * loss
        loss.backward()

    def clip(self, share: Share, most: float, groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """Clip the gradients' copies; a weight without a gradient gets one of zeros."""
        for weight, copy in zip(self.own, self.updated, strict=True):
            if weight.grad is None:
                copy.grad = torch.zeros_like(copy)
            else:
                copy.grad = weight.grad.float()
            weight.grad = None
        gradients = gradients_of(groups)
        if self.scale is not None:
            share = 1 / self.scale.value * share
        norm = share * norm_of(gradients)
        if self.scale is None:
            if most > 0:
                share = share * (most / (norm + 1e-6)).clamp_(max=1)
        elif norm > most > 0:
            share = share * (most / norm)
        torch._foreach_mul_(gradients, share)
        return norm

    def lower_scale(self) -> bool:
        """Lower the loss scale, where the loss is scaled; return whether it could be lowered."""
        return self.scale is not None and self.scale.lower()

    def write_back(self) -> None:
        """Copy updated weights to the model."""
        if self.scale is not None:
            self.scale.grow()
        torch._foreach_copy_([weight.data for weight in self.own], [copy.data for copy in self.updated])

    def state_dict(self) -> dict[str, Any]:
        """Return the copies and the loss scale."""
        state: dict[str, Any] = {"fp32_weights": [copy.data for copy in self.updated]}
        if self.scale is not None:
            state["loss_scale"] = self.scale.value
            state["loss_scaler"] = self.scale.counts()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them out of an optimizer's state."""
        for copy, saved in zip(self.updated, state.pop("fp32_weights"), strict=True):
            copy.data.copy_(saved)
        if self.scale is not None:
            self.scale.value = state.pop("loss_scale")
            vars(self.scale).update({name.lstrip("_"): count for name, count in state.pop("loss_scaler").items()})


class LossScale:
    """Factor of the loss, halved after an overflow and doubled after many updates without one.

    Counts have the names that fairseq's scaler has for them.
    """

    LEAST = 1e-4
    EVERY = 2**14

    def __init__(self) -> None:
        self.value = 2.0**7
        self.iter = 0
        self.last_overflow_iter = -1
        self.last_rescale_iter = -1
        self.overflows_since_rescale = 0

    def counts(self) -> dict[str, int]:
        """Return the counts by fairseq's names."""
        return {f"_{name}": count for name, count in vars(self).items() if name != "value"}

    def grow(self) -> None:
        """Count an update, after which the scale may double."""
        if (self.iter - self.last_overflow_iter) % self.EVERY == 0:
            self.value *= 2
            self.last_rescale_iter = self.iter
        self.iter += 1

    def lower(self) -> bool:
        """Halve the scale after an overflow; return False where it is as low as it may be."""
        self.last_overflow_iter = self.last_rescale_iter = self.iter
        self.iter += 1
        if self.value / 2 <= self.LEAST:
            return False
        self.value /= 2
        return True


def gradients_of(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Return the gradients of all weights of an optimizer that have one."""
    return [weight.grad for group in groups for weight in group["params"] if weight.grad is not None]


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients as one vector."""
    norms = [torch.norm(gradient, p=2, dtype=torch.float32) for gradient in gradients]
    if len(norms) == 1:
        return norms[0]
    return torch.norm(torch.stack(norms))
