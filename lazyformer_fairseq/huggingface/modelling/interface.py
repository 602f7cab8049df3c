"""What the stack gives each sublayer, and the tables in which parts enter their classes."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

from torch import Tensor, nn

# Of what sublayers hand on, by name: reused distributions; keys and values; attention probabilities (B, N, T, K).
DISTRIBUTION, KEYS_AND_VALUES, PROBABILITIES = "distribution", "keys and values", "probabilities"

# By letter of the pattern the class of a sublayer; by the name of its first setting, a kind of attention of an ``s``.
SUBLAYERS: dict[str, type[nn.Module]] = {}
KINDS: dict[str, type[nn.Module]] = {}


@dataclass(frozen=True)
class PlannedSublayer:
    """A sublayer of the plan.

    Attributes:
        letter: of the pattern.
        kinds: of attention that its settings choose, the outermost first.
        settings: of these kinds, all, by name.
        readers: for each sublayer above that reads from this one, what it reads.
        giver: the sublayer that this one reads from.
        common: one dict for the whole network, for weights that sublayers share, by name.
    """

    letter: str
    kinds: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    readers: tuple[str, ...] = ()
    giver: Optional["PlannedSublayer"] = None
    common: dict[str, Any] = field(default_factory=dict)


def read_plan(plan: list[dict[str, Any]]) -> list[PlannedSublayer]:
    """The config's plan, in which `giver` is a number of a sublayer. Raises a ValueError where a class is missing."""
    planned: list[PlannedSublayer] = []
    common: dict[str, Any] = {}
    for place in plan:
        lacking = [f"sublayers {place['letter']}"] if place["letter"] not in SUBLAYERS else []
        lacking += [f"attention of kind {kind}" for kind in place["kinds"] if kind not in KINDS]
        if lacking:
            raise ValueError(f"this file has no {', '.join(lacking)}: export the checkpoint again")
        giver = None if place["giver"] is None else planned[place["giver"]]
        letter, kinds, readers = place["letter"], tuple(place["kinds"]), tuple(place["readers"])
        planned.append(PlannedSublayer(letter, kinds, place["settings"], readers, giver, common))
    return planned


class Shared(NamedTuple):
    """What all sublayers of a forward pass share.

    Attributes:
        padding_mask_BT: True at padding, which may stand anywhere; None where there is none.
        bias_1NTT: T5's relative position bias, for the scores of (query, key); None for none.
        global_positions_BT: True at tokens that the caller marks; None where nobody does.
        output_attentions: an attending sublayer then hands its probabilities on, as PROBABILITIES.
        attention: "eager" or "sdpa", how attention is computed where it is not asked for probabilities.
    """

    padding_mask_BT: Optional[Tensor] = None
    bias_1NTT: Optional[Tensor] = None
    global_positions_BT: Optional[Tensor] = None
    output_attentions: bool = False
    attention: str = "eager"


class Sublayer(nn.Module):
    """The base of what SUBLAYERS has: built as ``(config, planned)``.

    Attributes:
        is_residual: whether the stack puts LayerNorm, dropout and a residual connection around it.
    """

    is_residual = True

    def forward(self, x_BTC: Tensor, below: dict[str, Any], shared: Shared) -> tuple[Tensor, dict[str, Any]]:
        """The output (B, T, C), and what it hands on, by name; `below` has what those below have handed on."""
        raise NotImplementedError
