"""LayerNorms of a post-norm model where sublayers go or come.

A sublayer that adds nothing leaves its LayerNorm of an input that is normalised already. Of such an input g n + b, n
with mean 0 and variance 1, the mean over channels is about that of b, and the variance about mean(g^2) + var(b): its
LayerNorm is about a linear map of each channel, and that map can be part of the LayerNorm below. In a pre-norm model
LayerNorms go and come with their sublayers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.warm_start.alignment import Alignment

EMBEDDINGS = "encoder.sentence_encoder.embedding_layer_norm."
SUBLAYER = "encoder.sentence_encoder.sublayers.{}.layer_norm."


class Norm(NamedTuple):
    """Weight g and bias b of a LayerNorm, (C,) each."""

    weight: Tensor
    bias: Tensor

    @property
    def mean(self) -> Tensor:
        """Over channels of its output, about."""
        return self.bias.mean()

    @property
    def deviation(self) -> Tensor:
        """Over channels of its output, about."""
        return (self.weight.square().mean() + self.bias.var(correction=0)).sqrt()

    def then(self, above: "Norm") -> "Norm":
        """One LayerNorm in place of this one and one right above it, about."""
        scale = above.weight / self.deviation
        return Norm(self.weight * scale, (self.bias - self.mean) * scale + above.bias)

    def neutral(self) -> "Norm":
        """One that leaves the output of this one as it is, about."""
        return Norm(self.deviation.expand_as(self.weight).clone(), self.mean.expand_as(self.bias).clone())


def carry_norms(
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    alignment: Alignment,
    old_plan: Sequence[PlannedSublayer],
    new_plan: Sequence[PlannedSublayer],
) -> dict[str, Tensor]:
    """LayerNorms that change because sublayers went or came, by name.

    The norm of a sublayer that went becomes part of the one below it; that of a sublayer that came is neutral.

    Args:
        old, new: weights of the models.
        alignment: old sublayer of each new one.
    """
    place, last = EMBEDDINGS, _norm(old, EMBEDDINGS)  # the highest norm so far that stays, in the new model
    changed: dict[str, Norm] = {}
    come: list[int] = []
    next_old = 0
    for index, origin in enumerate([*alignment, len(old_plan)]):
        if origin is None:
            come += [index] * (not new_plan[index].kind.is_identity)
            continue
        for gone in range(next_old, origin):
            if not old_plan[gone].kind.is_identity:
                last = last.then(_norm(old, SUBLAYER.format(gone)))
                changed[place] = last
        changed |= dict.fromkeys(map(SUBLAYER.format, come), last.neutral())
        if index < len(alignment):
            place, next_old, come = SUBLAYER.format(index), origin + 1, []
            last = _norm(new, place)
    return {
        f"{name}{kind}": weight.to(new[f"{name}{kind}"].dtype)
        for name, norm in changed.items()
        for kind, weight in norm._asdict().items()
    }


def _norm(weights: Mapping[str, Tensor], name: str) -> Norm:
    return Norm(*(weights[f"{name}{kind}"].to(torch.float32) for kind in Norm._fields))
