"""Initialization of a new sublayer from an old one: projections, wider hidden layers, added or removed LayerNorms.

Weight names are relative to the model's prefix ``sublayers.I.``, such as ``layer_norm.weight`` or ``inner.fc1.weight``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.sublayers.attention import AttentionSublayer
from lazyformer_fairseq.modules.sublayers.feed_forward import FeedForward, ResidualSublayer
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import ENCODER

Weights = Mapping[str, Tensor]
NORM = "layer_norm."
INNER = "inner."
EMBEDDINGS = "encoder.sentence_encoder.embedding_layer_norm."
SUBLAYER = "encoder.sentence_encoder.sublayers.{}.layer_norm."
PARAMETERS = ("weight", "bias")


@dataclass(frozen=True)
class Old:
    """An old sublayer with its weights.

    Attributes:
        planned: the sublayer's entry in the old plan.
        weights: the sublayer's weights.
        producer: the sublayer that it reads from, if any.
    """

    planned: PlannedSublayer
    weights: Weights
    producer: Optional["Old"] = None


@dataclass
class Taken:
    """A new sublayer's weights and their origins.

    Attributes:
        weights: the weights by name.
        kept: the parts copied from the old sublayer: q, k, v, out, norm, or weight names.
        borrowed: the parts copied from the sublayer that the old one reads from.
        dropped: the old sublayer's parts that the new one does not have.
        new: the names of newly initialized weights.
    """

    weights: dict[str, Tensor]
    kept: list[str] = field(default_factory=list)
    borrowed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


def take(planned: PlannedSublayer, sublayer: ResidualSublayer, old: Old) -> Taken:
    """Initialize a new sublayer's weights from an old sublayer.

    For attention, the projections (q, k, v and output) that both sublayers have are copied. If the old sublayer lacks a
    projection because it reads from another sublayer (an ``l`` has no queries and keys; a ``k`` has no keys and
    values), the projection is copied from that sublayer. A feed-forward may become wider: the output columns of the
    additional hidden units are zero, so its output stays the same. All other weights are copied if their names and
    shapes match.

    Args:
        planned: the new sublayer's entry in the plan.
        sublayer: the newly initialized sublayer. Its weights are used wherever nothing is copied.
        old: the old sublayer.

    Raises:
        UserError: a feed-forward would become narrower, gain or lose a gate, or change its number of experts, or
            weights differ in shape although the settings are the same.
    """
    fresh = sublayer.state_dict()
    if planned.values.get("experts") != old.planned.values.get("experts"):
        raise UserError(
            f"{planned.text} cannot use the weights of {old.planned.text}, because their numbers of experts differ; "
            "name a different old one in --from-sublayers, or use - to initialize the new one from scratch"
        )

    taken = Taken({name: weight.clone() for name, weight in fresh.items()})
    found: set[str] = set()
    incomplete: set[str] = set()
    if isinstance(sublayer.inner, AttentionSublayer):
        found, incomplete = _take_attention(planned, old, taken)
    elif isinstance(sublayer.inner, FeedForward):
        found = _take_feed_forward(planned, old, taken)
    for name, weight in old.weights.items():
        fits = name in fresh and fresh[name].shape == weight.shape
        if fits and name not in found | incomplete:
            taken.weights[name] = weight.clone()
            taken.kept.append("norm" if name.startswith(NORM) else name)
            found.add(name)

    if old.planned.text == planned.text:
        for name in sorted(old.weights.keys() & fresh.keys() - found):
            raise UserError(
                f"{planned.text}: {name} has shape {tuple(old.weights[name].shape)} in the old model and "
                f"{tuple(fresh[name].shape)} in the new one; the shape depends on the number of positions, so keep the "
                "old --max-positions"
            )

    if isinstance(sublayer.inner, AttentionSublayer):
        for name, weight in sublayer.inner.copied(taken.weights, INNER).items():
            if name not in found:  # such as global tokens' projections, which start as copies of the others
                taken.weights[name] = weight.clone()
                found.add(name)

    taken.kept = list(dict.fromkeys(taken.kept))
    taken.new = sorted(fresh.keys() - found)
    return taken


def _take_attention(planned: PlannedSublayer, old: Old, taken: Taken) -> tuple[set[str], set[str]]:
    """Copy projections; return the names of weights copied entirely, and of weights with newly initialized parts."""
    fresh_parts: set[str] = set()
    places = _parts(planned)
    for part, place in places.items():
        if part in _parts(old.planned):
            source = old
            taken.kept.append(part)
        elif old.producer is not None and part in _parts(old.producer.planned):
            source = old.producer
            taken.borrowed.append(part)
        else:
            fresh_parts.add(place[0])
            continue
        for parameter in PARAMETERS:
            weight = _read(source.weights, _parts(source.planned)[part], parameter)
            target = _read(taken.weights, place, parameter)
            if weight is not None and target is not None:
                target.copy_(weight)
    taken.dropped += [part for part in _parts(old.planned) if part not in places]

    taken.kept.append("out")
    for parameter in PARAMETERS:
        name = f"{INNER}out_proj.{parameter}"
        if name in taken.weights:
            taken.weights[name] = old.weights[name].clone()

    linears = {linear for linear, _, _ in places.values()}
    whole = {"out_proj", *linears} - fresh_parts
    return _names(whole), _names(fresh_parts)


def _names(linears: Iterable[str]) -> set[str]:
    return {f"{INNER}{linear}.{parameter}" for linear in linears for parameter in PARAMETERS}


def _parts(planned: PlannedSublayer) -> Mapping[str, tuple[str, int, int]]:
    return planned.kind.module(ENCODER).parts(planned)


def _read(weights: Weights, place: tuple[str, int, int], parameter: str) -> Optional[Tensor]:
    """Return a view of one part of a linear layer, or None if the weights do not contain it.

    Args:
        weights: the sublayer's weights.
        place: the linear layer's name, the part's index, and the number of parts.
        parameter: ``weight`` or ``bias``.
    """
    linear, number, parts = place
    weight = weights.get(f"{INNER}{linear}.{parameter}")
    if weight is None:
        return None
    return weight.chunk(parts)[number]


def _take_feed_forward(planned: PlannedSublayer, old_one: Old, taken: Taken) -> set[str]:
    """Copy the old hidden units to the front (of both halves, if gated), and zero the additional units' output."""
    old = old_one.weights
    halves = 1 + bool(planned.values["gate"])
    if halves != 1 + bool(old_one.planned.values["gate"]):
        raise UserError(
            f"{planned.text} cannot use the weights of {old_one.planned.text}, because only one of the two has a gate; "
            "name another old sublayer in --from-sublayers, or use - to initialize the new one from scratch"
        )
    width = old[f"{INNER}fc2.weight"].size(1)
    new_width = taken.weights[f"{INNER}fc2.weight"].size(1)
    if new_width < width:
        raise UserError(
            f"--encoder-ffn-embed-dim {new_width}: the old model's is {width}, and hidden units cannot be removed; "
            f"use {width} or more"
        )
    for parameter, number in product(PARAMETERS, range(halves)):
        place = ("fc1", number, halves)
        found = _read(old, place, parameter)
        target = _read(taken.weights, place, parameter)
        if found is not None and target is not None:
            target[:width] = found
    taken.weights[f"{INNER}fc2.weight"].zero_()[:, :width] = old[f"{INNER}fc2.weight"]
    if f"{INNER}fc2.bias" in old:
        taken.weights[f"{INNER}fc2.bias"] = old[f"{INNER}fc2.bias"].clone()
    taken.kept += ["fc1", "fc2"]
    return _names(("fc1", "fc2"))


class Norm(NamedTuple):
    """A LayerNorm's weight g and bias b, each (C,).

    b is 0 if there is no bias. It is also 0 for RMSNorm, where the input is assumed to have mean 0.
    """

    weight: Tensor
    bias: Tensor

    @property
    def mean(self) -> Tensor:
        """The estimated mean of the output over channels."""
        return self.bias.mean()

    @property
    def deviation(self) -> Tensor:
        """The estimated standard deviation of the output over channels."""
        variance = self.weight.square().mean() + self.bias.var(correction=0)
        return variance.sqrt()

    def then(self, above: "Norm") -> "Norm":
        """Return a LayerNorm that approximates this one followed by another one directly above it."""
        scale = above.weight / self.deviation
        return Norm(self.weight * scale, (self.bias - self.mean) * scale + above.bias)

    def neutral(self) -> "Norm":
        """Return a LayerNorm that, placed directly above this one, leaves its output approximately unchanged."""
        weight = self.deviation.expand_as(self.weight).clone()
        bias = self.mean.expand_as(self.bias).clone()
        return Norm(weight, bias)


def carry_norms(
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    alignment: Sequence[Optional[int]],
    old_plan: Sequence[PlannedSublayer],
    new_plan: Sequence[PlannedSublayer],
) -> dict[str, Tensor]:
    """Adjust a post-norm model's LayerNorm weights to removed and added sublayers; return the changed weights by name.

    A post-norm sublayer that adds nothing to the residual still normalizes its input, which the LayerNorm below has
    already normalized. This input is g n + b, where n has mean 0 and variance 1. Its mean over channels is about
    mean(b), and its variance is about mean(g^2) + var(b). The second LayerNorm is therefore approximately a per-channel
    linear function. When a sublayer is removed, this function is merged into the LayerNorm below. The LayerNorm of an
    added sublayer is set so that it changes nothing. Pre-norm models do not need this, because their LayerNorms are
    inside the sublayers.

    Args:
        old: the old model's weights.
        new: the new model's weights.
        alignment: for each new sublayer, the index of the old one, or None.
        old_plan: the old model's sublayers.
        new_plan: the new model's sublayers.
    """
    place = EMBEDDINGS  # the new model's name for the highest kept LayerNorm so far
    last = _norm(old, EMBEDDINGS)
    changed = {}
    added = []
    next_old = 0
    for index, origin in enumerate([*alignment, len(old_plan)]):
        if origin is None:
            if not new_plan[index].kind.is_identity:
                added.append(index)
            continue
        for removed in range(next_old, origin):
            if not old_plan[removed].kind.is_identity:
                last = last.then(_norm(old, SUBLAYER.format(removed)))
                changed[place] = last
        changed |= dict.fromkeys(map(SUBLAYER.format, added), last.neutral())
        if index < len(alignment):
            place = SUBLAYER.format(index)
            next_old = origin + 1
            added = []
            last = _norm(new, place)
    weights = {}
    for norm_name, norm in changed.items():
        for parameter, weight in norm._asdict().items():
            name = f"{norm_name}{parameter}"
            if name in new:
                weights[name] = weight.to(new[name].dtype)
    return weights


def _norm(weights: Mapping[str, Tensor], name: str) -> Norm:
    weight = weights[f"{name}weight"].to(torch.float32)
    bias = weights.get(f"{name}bias", torch.zeros_like(weight))
    return Norm(weight, bias.to(torch.float32))
