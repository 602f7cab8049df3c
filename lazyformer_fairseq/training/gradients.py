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
    """In single precision.

    Attributes:
        own: those of the model.
        updated: those that the optimizer updates.
    """

    def __init__(self, weights: Iterable[nn.Parameter]):
        self.own = self.updated = [weight for weight in weights if weight.requires_grad]

    def clear(self) -> None:
        """Forgets all gradients."""
        for weight in (*self.own, *self.updated):
            weight.grad = None

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self, share: Share, most: float, groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """Multiplies gradients by `share`, and makes them as short as `most` (0: of any length); returns their norm.

        The norm is what it was before they were made short.

        Args:
            groups: of the optimizer, which has the weights in the order in which they are summed.
        """
        gradients = gradients_of(groups)
        torch._foreach_mul_(gradients, share)
        norm = norm_of(gradients)
        if most > 0:
            torch._foreach_mul_(gradients, (most / (norm + 1e-6)).clamp_(max=1))
        return norm

    def lower_scale(self) -> bool:
        """After a gradient that is not finite: whether the loss was scaled too far, and the next one will be less."""
        return False

    def write_back(self) -> None:
        """After the optimizer's step."""

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer's state has beside its own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes this out of an optimizer's state."""


class HalfWeights(Weights):
    """In bf16 or fp16.

    Args:
        scales: whether the loss is scaled.
    """

    def __init__(self, weights: Iterable[nn.Parameter], scales: bool):
        super().__init__(weights)
        self.updated = [nn.Parameter(weight.detach().float()) for weight in self.own]
        for weight, copy in zip(self.own, self.updated, strict=True):
            vars(copy).update(vars(weight))  # Muon's marks
        if scales:
            self.scale = LossScale()
        else:
            self.scale = None

    def backward(self, loss: Tensor) -> None:
        (loss if self.scale is None else self.scale.value * loss).backward()

    def clip(self, share: Share, most: float, groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """As above, of the gradients' copies; a weight without a gradient gets one of zeros."""
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
        return self.scale is not None and self.scale.lower()

    def write_back(self) -> None:
        if self.scale is not None:
            self.scale.grow()
        torch._foreach_copy_([weight.data for weight in self.own], [copy.data for copy in self.updated])

    def state_dict(self) -> dict[str, Any]:
        if self.scale is None:
            scale = {}
        else:
            scale = {"loss_scale": self.scale.value, "loss_scaler": self.scale.counts()}
        return {"fp32_weights": [copy.data for copy in self.updated], **scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = torch.cat([weights.flatten() for weights in state.pop("fp32_weights")])  # one vector, or one each
        for copy, part in zip(self.updated, saved.split([copy.numel() for copy in self.updated]), strict=True):
            copy.data.copy_(part.view_as(copy))
        if self.scale is not None:
            self.scale.value = state.pop("loss_scale")
            vars(self.scale).update({name.lstrip("_"): count for name, count in state.pop("loss_scaler").items()})


class LossScale:
    """By what the loss is multiplied: half after an overflow, twice after many updates without one.

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
        return {f"_{name}": count for name, count in vars(self).items() if name != "value"}

    def grow(self) -> None:
        """After an update."""
        if (self.iter - self.last_overflow_iter) % self.EVERY == 0:
            self.value *= 2
            self.last_rescale_iter = self.iter
        self.iter += 1

    def lower(self) -> bool:
        """After an overflow; False where the scale is as low as it may be."""
        self.last_overflow_iter = self.last_rescale_iter = self.iter
        self.iter += 1
        if self.value / 2 <= self.LEAST:
            return False
        self.value /= 2
        return True


def gradients_of(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Of all weights of an optimizer that have one."""
    return [weight.grad for group in groups for weight in group["params"] if weight.grad is not None]


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """Of all as one vector."""
    norms = [torch.norm(gradient, p=2, dtype=torch.float32) for gradient in gradients]
    if len(norms) == 1:
        return norms[0]
    return torch.norm(torch.stack(norms))
