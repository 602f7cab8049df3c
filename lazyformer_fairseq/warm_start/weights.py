"""What one new sublayer takes of an old one: projections by part, heads in another order, wider feed-forwards.

Names of weights are those below ``sublayers.I.`` of a model: ``layer_norm.weight``, ``inner.fc1.weight`` and so on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.sublayers.attention_heads import AttentionSublayer
from lazyformer_fairseq.modules.sublayers.feed_forward import FeedForward
from lazyformer_fairseq.modules.sublayers.residual import ResidualSublayer
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import ENCODER

Weights = Mapping[str, Tensor]
NORM, INNER = "layer_norm.", "inner."
KINDS = ("weight", "bias")


@dataclass(frozen=True)
class Old:
    """An old sublayer, and the one that it reads from, with their weights.

    Attributes:
        producer: None where it reads nothing.
    """

    planned: PlannedSublayer
    weights: Weights
    producer: Optional["Old"] = None


@dataclass
class Taken:
    """The weights of a new sublayer, and where they come from.

    Attributes:
        kept: parts from the old sublayer: of q, k, v, out, norm, or names of weights.
        borrowed: parts from the sublayer that the old one reads.
        dropped: parts of the old sublayer that the new one lacks.
        new: names of weights that start fresh.
    """

    weights: dict[str, Tensor]
    kept: list[str] = field(default_factory=list)
    borrowed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


def take(
    planned: PlannedSublayer,
    sublayer: ResidualSublayer,
    old: Old,
    heads: int,
    head_order: Optional[Sequence[int]] = None,
) -> Taken:
    """The weights of a new sublayer from those of an old one.

    An attention takes of q, k, v and the output what both have. What the old one lacks, because it read it (an ``l``
    queries and keys, a ``k`` keys and values), comes from the sublayer that it read. A feed-forward may become wider:
    further columns of its output are zero, so that it computes the same. Everything else is taken by name and shape.

    Args:
        sublayer: the new one with fresh weights, which stay where nothing is taken.
        heads: N.
        head_order: old head of each new head; None for the same order. Of q, k, v, rows are permuted, of the output
            columns, and of what kinds of attention add to values, the first dimension.

    Raises:
        UserError: a feed-forward would become narrower, or the settings are the same and yet the shapes differ.
    """
    fresh = sublayer.state_dict()
    taken = Taken({name: weight.clone() for name, weight in fresh.items()})
    found: set[str] = set()
    incomplete: set[str] = set()
    if isinstance(sublayer.inner, AttentionSublayer):
        found, incomplete = _take_attention(planned, old, taken, heads, head_order)
    elif isinstance(sublayer.inner, FeedForward):
        found = _take_feed_forward(old.weights, taken)
    for name, weight in old.weights.items():
        if name in fresh and name not in found | incomplete and fresh[name].shape == weight.shape:
            is_by_head = name.startswith(f"{INNER}value_makers.")
            taken.weights[name] = _permuted(weight, heads, head_order if is_by_head else None, 0)
            taken.kept.append("norm" if name.startswith(NORM) else name)
            found.add(name)
    if old.planned.text == planned.text:
        _refuse_other_shapes(planned, old.weights, fresh, found)
    if isinstance(sublayer.inner, AttentionSublayer):
        for name, weight in sublayer.inner.copied(taken.weights, INNER).items():
            if name not in found:  # as those of global tokens: they start as copies of what was taken
                taken.weights[name] = weight.clone()
                found.add(name)
    taken.kept = list(dict.fromkeys(taken.kept))
    taken.new = sorted(fresh.keys() - found)
    return taken


def _take_attention(
    planned: PlannedSublayer, old: Old, taken: Taken, heads: int, head_order: Optional[Sequence[int]]
) -> tuple[set[str], set[str]]:
    """Puts projections into place; returns the names of the whole ones, and of those with a part that is fresh."""
    fresh_parts: set[str] = set()
    places = _parts(planned)
    for part, place in places.items():
        source = next((each for each in (old, old.producer) if each and part in _parts(each.planned)), None)
        if source is None:
            fresh_parts.add(place[0])
            continue
        (taken.kept if source is old else taken.borrowed).append(part)
        for kind in KINDS:
            weight = _read(source.weights, _parts(source.planned)[part], kind)
            if weight is not None:
                _read(taken.weights, place, kind).copy_(_permuted(weight, heads, head_order, 0))
    taken.dropped += [part for part in _parts(old.planned) if part not in places]
    taken.kept.append("out")
    out = f"{INNER}out_proj."
    taken.weights[f"{out}weight"] = _permuted(old.weights[f"{out}weight"], heads, head_order, 1)
    taken.weights[f"{out}bias"] = old.weights[f"{out}bias"].clone()
    whole = {"out_proj", *(linear for linear, _, _ in places.values())} - fresh_parts
    return _names(whole), _names(fresh_parts)


def _names(linears: Iterable[str]) -> set[str]:
    return {f"{INNER}{linear}.{kind}" for linear in linears for kind in KINDS}


def _parts(planned: PlannedSublayer) -> Mapping[str, tuple[str, int, int]]:
    return planned.kind.module(ENCODER).parts(planned)


def _read(weights: Weights, place: tuple[str, int, int], kind: str) -> Optional[Tensor]:
    """A view of a projection's part."""
    linear, number, parts = place
    weight = weights.get(f"{INNER}{linear}.{kind}")
    return None if weight is None else weight.chunk(parts)[number]


def _permuted(weight: Tensor, heads: int, order: Optional[Sequence[int]], dim: int) -> Tensor:
    """A copy with heads, which lie side by side in this dimension, in another order."""
    if order is None:
        return weight.clone()
    return weight.unflatten(dim, (heads, -1)).index_select(dim, torch.tensor(order)).flatten(dim, dim + 1)


def _take_feed_forward(old: Weights, taken: Taken) -> set[str]:
    """Old hidden numbers first; what further ones give is multiplied by zero."""
    width, new_width = (weights[f"{INNER}fc1.bias"].size(0) for weights in (old, taken.weights))
    if new_width < width:
        raise UserError(
            f"--encoder-ffn-embed-dim {new_width}: the old model's is {width}, and nothing says which of its numbers "
            f"to leave out; give {width} or more"
        )
    taken.weights[f"{INNER}fc1.weight"][:width] = old[f"{INNER}fc1.weight"]
    taken.weights[f"{INNER}fc1.bias"][:width] = old[f"{INNER}fc1.bias"]
    taken.weights[f"{INNER}fc2.weight"].zero_()[:, :width] = old[f"{INNER}fc2.weight"]
    taken.weights[f"{INNER}fc2.bias"] = old[f"{INNER}fc2.bias"].clone()
    taken.kept += ["fc1", "fc2"]
    return _names(("fc1", "fc2"))


def _refuse_other_shapes(planned: PlannedSublayer, old: Weights, fresh: Weights, found: set[str]) -> None:
    for name in sorted(old.keys() & fresh.keys() - found):
        raise UserError(
            f"{planned.text}: its {name} is {tuple(old[name].shape)} in the old model and {tuple(fresh[name].shape)} "
            "in the new one: it has a part for each position, so give the old --max-positions"
        )
