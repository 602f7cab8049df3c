"""Gradient scaling, gradient clipping and master weights, with the same arithmetic as fairseq's trainer.

Half-precision weights have master copies in single precision, which the optimizer updates. In fp16 the loss is also
scaled to keep small gradients from underflowing (Micikevicius et al., 2018, "Mixed Precision Training", sections 3.1
and 3.2).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

import torch
from torch import Tensor, nn

Factor = Union[float, Tensor]


class Weights:
    """A model's trainable weights in single precision.

    Attributes:
        own: the model's weights.
        updated: the weights that the optimizer updates; in this class, the same list as `own`.
    """

    def __init__(self, weights: Iterable[nn.Parameter]):
        self.own = self.updated = [weight for weight in weights if weight.requires_grad]

    def clear(self) -> None:
        """Clear all gradients."""
        for weight in (*self.own, *self.updated):
            weight.grad = None

    def backward(self, loss: Tensor) -> None:
        """Backpropagate the loss."""
        loss.backward()

    def clip(self, factor: Factor, most: float, groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scale and clip the gradients, and return their norm after scaling and before clipping.

        Args:
            factor: the factor by which to scale all gradients.
            most: the maximum norm; 0 disables clipping.
            groups: the optimizer's parameter groups, in the order in which norms are summed.
        """
        gradients = gradients_of(groups)
        torch._foreach_mul_(gradients, factor)
        norm = norm_of(gradients)
        if most > 0:
            torch._foreach_mul_(gradients, (most / (norm + 1e-6)).clamp_(max=1))
        return norm

    def lower_scale(self) -> bool:
        """Lower the loss scale after a non-finite gradient, and return True if the update should be retried."""
        return False

    def write_back(self) -> None:
        """Copy the updated weights to the model after the optimizer's step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints store in addition to the optimizer's state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this state from an optimizer's state dict, and remove it from that dict."""


class HalfWeights(Weights):
    """A model's trainable weights in bf16 or fp16, with single-precision copies that the optimizer updates.

    Args:
        weights: the model's weights.
        scales: whether to scale the loss.
    """

    def __init__(self, weights: Iterable[nn.Parameter], scales: bool):
        super().__init__(weights)
        self.updated = [nn.Parameter(weight.detach().float()) for weight in self.own]
        for weight, copy in zip(self.own, self.updated, strict=True):
            vars(copy).update(vars(weight))  # includes the marks for Muon
        self.scale = LossScale() if scales else None

    def backward(self, loss: Tensor) -> None:
        """Backpropagate the scaled loss."""
        if self.scale is not None:
            loss = self.scale.value * loss
        loss.backward()

    def clip(self, factor: Factor, most: float, groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """Move the gradients to the copies, then scale and clip them; a missing gradient becomes zeros."""
        for weight, copy in zip(self.own, self.updated, strict=True):
            if weight.grad is None:
                copy.grad = torch.zeros_like(copy)
            else:
                copy.grad = weight.grad.float()
            weight.grad = None
        gradients = gradients_of(groups)
        if self.scale is not None:
            factor = 1 / self.scale.value * factor
        norm = factor * norm_of(gradients)
        if self.scale is None:
            if most > 0:
                factor = factor * (most / (norm + 1e-6)).clamp_(max=1)
        elif norm > most > 0:
            factor = factor * (most / norm)
        torch._foreach_mul_(gradients, factor)
        return norm

    def lower_scale(self) -> bool:
        """Lower the loss scale, if any, and return True if it was lowered."""
        return self.scale is not None and self.scale.lower()

    def write_back(self) -> None:
        """Copy the updated weights to the model, and count the update toward the next increase of the loss scale."""
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
        """Restore the copies and the loss scale from an optimizer's state dict, and remove them from that dict."""
        for copy, saved in zip(self.updated, state.pop("fp32_weights"), strict=True):
            copy.data.copy_(saved)
        if self.scale is not None:
            self.scale.value = state.pop("loss_scale")
            counts = {name.lstrip("_"): count for name, count in state.pop("loss_scaler").items()}
            vars(self.scale).update(counts)


class LossScale:
    """A dynamic loss scale, which is halved after an overflow and doubled after many updates without one.

    The counters have the same names as in fairseq's scaler, minus the leading underscores.
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
        """Return the counters under fairseq's names."""
        return {f"_{name}": count for name, count in vars(self).items() if name != "value"}

    def grow(self) -> None:
        """Count an update without overflow, and double the scale after every `EVERY` such updates."""
        if (self.iter - self.last_overflow_iter) % self.EVERY == 0:
            self.value *= 2
            self.last_rescale_iter = self.iter
        self.iter += 1

    def lower(self) -> bool:
        """Halve the scale after an overflow; return False if it is already at its minimum."""
        self.last_overflow_iter = self.last_rescale_iter = self.iter
        self.iter += 1
        if self.value / 2 <= self.LEAST:
            return False
        self.value /= 2
        return True


def gradients_of(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Return the gradients of the weights in all parameter groups, leaving out weights without a gradient."""
    return [weight.grad for group in groups for weight in group["params"] if weight.grad is not None]


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the global L2 norm of the gradients."""
    norms = [torch.norm(gradient, p=2, dtype=torch.float32) for gradient in gradients]
    if len(norms) == 1:
        return norms[0]
    return torch.norm(torch.stack(norms))
