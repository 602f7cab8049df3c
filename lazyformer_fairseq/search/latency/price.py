"""What a pattern costs in latency, as a number and as something to differentiate."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.grammar import plan


@dataclass(frozen=True)
class PriceList:
    """Latency of one sublayer of each kind, milliseconds.

    Attributes:
        s: self-attention whose distribution nobody reads.
        f: feed-forward.
        s_read: self-attention that keeps its distribution for an ``l``.
        l: lazy attention.
        rest: of the model, embeddings and head.
    """

    s: float = 0.0
    f: float = 0.0
    s_read: float = 0.0
    l: float = 0.0  # noqa: E741  the kind's letter
    rest: float = 0.0

    def of(self, pattern: str) -> float:
        """Milliseconds of a model of this pattern."""
        if not pattern:
            return self.rest
        kinds = ("s_read" if sublayer.is_read else sublayer.kind for sublayer in plan(pattern))
        return self.rest + sum(getattr(self, kind) for kind in kinds)

    def expected(self, probabilities_LK: Tensor, candidates: Sequence[str]) -> Tensor:
        """Milliseconds a pattern drawn from these probabilities takes in the mean; differentiable.

        Exact where layers are drawn independently of each other. Whether an ``s`` is read depends on the layers above:
        ``read`` is the probability that of them an ``l`` comes before the next ``s``.
        """
        column = dict(zip(candidates, probabilities_LK.unbind(dim=-1), strict=True))
        zero = probabilities_LK.new_zeros(())
        total, read = zero + self.rest, zero
        for layer in reversed(range(len(probabilities_LK))):
            chance = {name: column[name][layer] if name in column else zero for name in ("s", "l", "f")}
            total = total + chance["f"] * self.f + chance["l"] * self.l
            total = total + chance["s"] * (self.s + read * (self.s_read - self.s))
            read = chance["l"] + (1 - chance["l"] - chance["s"]) * read
        return total

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def read_price_list(path: Path, kinds: Collection[str]) -> PriceList:
    """Reads ``{"s": 1.2, "f": 0.7}``: milliseconds by kind; ``s_read`` is as ``s`` and ``rest`` 0 unless given.

    Raises:
        UserError: the file is no such object, lacks a kind, or has an unknown name or a price below 0.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    known = list(PriceList.__dataclass_fields__)
    if not isinstance(content, dict) or not set(content) <= set(known):
        raise UserError(f'{path}: must be an object of milliseconds like {{"s": 1.2, "f": 0.7}}; names: {known}')
    for name, value in content.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise UserError(f"{path}: {name} is {value!r}, must be milliseconds, 0 or more")
    for kind in kinds:
        if kind not in content:
            raise UserError(f"{path}: has no price of {kind}, which the candidates or the baseline have")
    return PriceList(**{"s_read": content.get("s", 0.0), **content})


@dataclass(frozen=True)
class LatencyPrice:
    """What the architecture's loss pays for expected latency.

    Attributes:
        prices: milliseconds by kind.
        price: nats a prediction for one baseline's latency.
        budget: share of the baseline's latency that is free.
        baseline: the baseline's latency, milliseconds.
    """

    prices: PriceList
    price: float
    budget: float
    baseline: float

    def __call__(self, probabilities_LK: Tensor, candidates: Sequence[str]) -> Optional[Tensor]:
        """Nats to add to the loss; None where nothing has a price."""
        if not self.price:
            return None
        share = self.prices.expected(probabilities_LK, candidates) / self.baseline
        return self.price * (share - self.budget).clamp(min=0)
