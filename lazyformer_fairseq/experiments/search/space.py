"""The patterns that a search chooses among: their validity, their latency, and the steps from one to another."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.price import READ, REST, Prices
from lazyformer_fairseq.patterns.grammar import read_sublayer

# The candidate of each layer, the lowest first; identity included.
Path = tuple[str, ...]
DRAWS = 2000  # before a band of latencies is reached step by step
ROUNDING = 1e-9  # sums of the same prices in another order must not differ


class Band(NamedTuple):
    """Latencies from `low` to `high`, in ms: between a budget and the next lower one."""

    low: float
    high: float

    def distance(self, latency: float) -> float:
        """How far outside it is; 0 for one inside."""
        return max(self.low - latency, latency - self.high, 0.0)


class Space:
    """Valid patterns of `layers` layers: each consumer has something below it to read, and one layer is a sublayer.

    Args:
        candidates: names, at least two.
        prices: of the candidates, in ms.
    """

    def __init__(self, candidates: Sequence[str], layers: int, prices: Prices):
        self.candidates = tuple(candidates)
        self.layers = layers
        self.prices = prices
        self._kinds = {name: read_sublayer(name).kind for name in self.candidates}
        self._texts = {name: read_sublayer(name).text for name in self.candidates}

    def is_valid(self, path: Path) -> bool:
        handed_on: set[str] = set()
        for name in path:
            kind = self._kinds[name]
            if kind.reads is not None and kind.reads not in handed_on:
                return False
            handed_on.update(kind.hands_on)
        return not all(self._kinds[name].is_identity for name in path)

    def latency(self, path: Path) -> float:
        """Milliseconds by the price list; the same as `latency_of`."""
        total, read = self.prices.get(REST, 0.0), set()
        for name in reversed(path):
            kind, text = self._kinds[name], self._texts[name]
            alone = self.prices.get(text, 0.0)
            is_read = any(what in read for what in kind.kept_for_consumers)
            total += self.prices.get(text + READ, alone) if is_read else alone
            read.difference_update(kind.hands_on)
            if kind.reads is not None:
                read.add(kind.reads)
        return total

    def draw(self, chance: random.Random, shares: Optional[Sequence[Sequence[float]]] = None) -> Path:
        """A random valid pattern: uniform, or layer by layer by `shares` (L rows of K)."""
        while True:
            if shares is None:
                path = tuple(chance.choices(self.candidates, k=self.layers))
            else:
                path = tuple(chance.choices(self.candidates, row)[0] for row in shares)
            if self.is_valid(path):
                return path

    def mutated(self, path: Path, chance: random.Random) -> Path:
        """A valid pattern that differs in one layer, chosen uniformly among those that do."""
        return chance.choice(list(self.changes(path)))

    def changes(self, path: Path) -> Iterator[Path]:
        """All valid patterns that differ in one layer."""
        for layer, now in enumerate(path):
            for name in self.candidates:
                changed = (*path[:layer], name, *path[layer + 1 :])
                if name != now and self.is_valid(changed):
                    yield changed

    def crossed(self, one: Path, other: Path, chance: random.Random) -> Path:
        """Each layer from either parent; a mixture that is not valid is drawn again, and `one` stands for none."""
        for _ in range(20):
            path = tuple(chance.choice(pair) for pair in zip(one, other, strict=True))
            if self.is_valid(path):
                return path
        return one

    def draw_within(self, band: Band, chance: random.Random, draw: Optional[Callable[[], Path]] = None) -> Path:
        """A random pattern whose latency lies in the band; where draws do not reach it, changes of one do.

        Args:
            draw: uniform by default.

        Raises:
            UserError: no pattern is cheap enough.
        """
        draw = draw or (lambda: self.draw(chance))
        nearest = path = draw()
        for _ in range(DRAWS):
            if band.distance(self.latency(path)) == 0:
                return path
            nearest = min(nearest, path, key=self._outside(band))
            path = draw()
        return self.moved_into(nearest, band, chance)

    def moved_into(self, path: Path, band: Band, chance: random.Random) -> Path:
        """The pattern, changed a layer at a time towards the band until none comes nearer.

        Raises:
            UserError: it is more expensive than the band then.
        """
        outside = self._outside(band)
        while outside(path) > 0:
            found = list(self.changes(path))
            chance.shuffle(found)
            nearest = min(found, key=outside)
            if outside(nearest) >= outside(path):
                break
            path = nearest
        if self.latency(path) > band.high:
            raise UserError(
                f"--budgets: no pattern of these candidates with {self.layers} layers costs less than {band.high:.3g} "
                "ms; give higher budgets, or cheaper candidates such as identity"
            )
        return path

    def _outside(self, band: Band) -> Callable[[Path], float]:
        return lambda path: band.distance(self.latency(path))


def bands_of(budgets: Sequence[float], baseline: float) -> list[Band]:
    """A band for each budget, the lowest first; the lowest is as wide as the narrowest of the others.

    Args:
        budgets: shares of the baseline's latency, each once.
        baseline: its latency in ms.
    """
    highs = sorted(baseline * budget * (1 + ROUNDING) for budget in budgets)
    widths = [high - low for low, high in pairwise(highs)]
    lowest = highs[0] - min(widths, default=0.1 * baseline)
    return [Band(low, high) for low, high in pairwise([lowest, *highs])]
