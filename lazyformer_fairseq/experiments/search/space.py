"""The patterns that a search chooses among: how they are written, their latency, how they are drawn."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.latency import Prices, latency_of
from lazyformer_fairseq.patterns.grammar import read_sublayer, split_sublayers

# A pattern as a part of a supernet: the candidate of each layer, the lowest first; identity included.
Subnet = tuple[str, ...]
DRAWS = 2000  # before a band of latencies is reached step by step
MISSES = 20  # in a row: a space of few patterns must come to an end
ROUNDING = 1e-9  # sums of the same prices in another order must not differ


class Band(NamedTuple):
    """Latencies from `low` to `high`, in ms: between a budget and the next lower one."""

    low: float
    high: float

    def distance(self, latency: float) -> float:
        """Return how far outside it is; 0 for one inside."""
        return max(self.low - latency, latency - self.high, 0.0)


class Space:
    """Valid patterns of `layers` layers: each consumer has something below it to read, and one layer is a sublayer.

    Args:
        candidates: names of the candidates, at least two.
        layers: the number of layers of a pattern.
        prices: the candidates' prices, in ms.
    """

    def __init__(self, candidates: Sequence[str], layers: int, prices: Prices):
        self.candidates = tuple(candidates)
        self.layers = layers
        self.prices = prices
        self._sublayers = {name: read_sublayer(name) for name in self.candidates}

    def is_valid(self, subnet: Subnet) -> bool:
        """Return whether a model can be built of it."""
        handed_on: set[str] = set()
        for name in subnet:
            kind = self._sublayers[name].kind
            if kind.reads is not None and kind.reads not in handed_on:
                return False
            handed_on.update(kind.hands_on)
        return not all(self._sublayers[name].kind.is_identity for name in subnet)

    def latency(self, subnet: Subnet) -> float:
        """Return milliseconds by the price list."""
        return latency_of(self.prices, [self._sublayers[name] for name in subnet])

    def draw(self, chance: random.Random) -> Subnet:
        """Draw a valid pattern uniformly."""
        while True:
            subnet = tuple(chance.choices(self.candidates, k=self.layers))
            if self.is_valid(subnet):
                return subnet

    def changes(self, subnet: Subnet) -> Iterator[Subnet]:
        """Yield all valid patterns that differ in one layer."""
        for layer, now in enumerate(subnet):
            for name in self.candidates:
                changed = (*subnet[:layer], name, *subnet[layer + 1 :])
                if name != now and self.is_valid(changed):
                    yield changed

    def draw_within(self, band: Band, chance: random.Random) -> Subnet:
        """Draw a pattern whose latency lies in the band; where draws do not reach it, change the nearest of them.

        Raises:
            UserError: no pattern is cheap enough.
        """

        def outside(subnet: Subnet) -> float:
            return band.distance(self.latency(subnet))

        nearest = subnet = self.draw(chance)
        for _ in range(DRAWS):
            if outside(subnet) == 0:
                return subnet
            nearest = min(nearest, subnet, key=outside)
            subnet = self.draw(chance)

        while outside(nearest) > 0:
            found = list(self.changes(nearest))
            chance.shuffle(found)
            best = min(found, key=outside)
            if outside(best) >= outside(nearest):
                break
            nearest = best
        if self.latency(nearest) > band.high:
            raise UserError(
                f"--budgets: no pattern of these candidates with {self.layers} layers costs less than {band.high:.3g} "
                "ms; give higher budgets, or cheaper candidates such as identity"
            )
        return nearest

    def draws(self, band: Band, chance: random.Random) -> Iterator[str]:
        """Yield patterns of a band, written out, each once, until many draws in a row find no new one.

        The bands are narrow, so that no draw is wasted on a pattern far below its budget.
        """
        known: set[str] = set()
        misses = 0
        while misses < MISSES:
            pattern = letters(self.draw_within(band, chance))
            if pattern in known:
                misses += 1
            else:
                misses = 0
                known.add(pattern)
                yield pattern


def bands_of(budgets: Sequence[float], baseline: float) -> list[Band]:
    """Return a band for each budget, the lowest first; the lowest is as wide as the narrowest of the others.

    Args:
        budgets: shares of the baseline's latency, each once.
        baseline: the baseline's latency in ms.
    """
    highs = sorted(baseline * budget * (1 + ROUNDING) for budget in budgets)
    widths = [high - low for low, high in pairwise(highs)]
    lowest = highs[0] - min(widths, default=0.1 * baseline)
    return [Band(low, high) for low, high in pairwise([lowest, *highs])]


def most_probable(probabilities: Sequence[Sequence[float]], candidates: Sequence[str]) -> list[str]:
    """Return the most probable candidate of each layer (PAR Transformer, section 2.1), the lowest layer first.

    A layer skips candidates that have nothing below to read, and takes its next most probable one. So does the first
    layer with identity where all layers would be identity.
    """
    kinds = {name: read_sublayer(name).kind for name in candidates}
    chosen: list[str] = []
    handed_on: set[str] = set()
    for row in probabilities:
        by_probability = sorted(zip(candidates, row, strict=True), key=lambda pair: -pair[1])
        possible = [name for name, _ in by_probability if kinds[name].reads in {None, *handed_on}]
        chosen.append(possible[0])
        handed_on.update(kinds[possible[0]].hands_on)
    if chosen and all(kinds[name].is_identity for name in chosen):
        first = dict(zip(candidates, probabilities[0], strict=True))
        others = [name for name in candidates if kinds[name].reads is None and not kinds[name].is_identity]
        chosen[0] = max(others, key=lambda name: first[name])
    return chosen


def letters(chosen: Sequence[str]) -> str:
    """Return the pattern written out, without identity layers."""
    return "".join(name for name in chosen if not read_sublayer(name).kind.is_identity)


def by_layer(chosen: Sequence[str]) -> str:
    """Return the same with a ``-`` for each identity layer, so that the n-th sublayer is the n-th layer."""
    return "".join(read_sublayer(name).text for name in chosen)


def compact(pattern: str) -> str:
    """Return a written-out pattern with repeats of plain groups: ``sfffsfffff`` is ``(sfff)x2 ff``.

    Among equally short ones it prefers groups that start with a sublayer that hands something on, as in the paper.
    """
    parts = split_sublayers(pattern)
    best: list[tuple[int, int, str]] = [(0, 0, "")]  # of the first n sublayers: length, odd groups, text
    for end in range(1, len(parts) + 1):
        length, odd, text = best[end - 1]
        joins = not text or text[-1].isalpha() or text[-1] in "]-"
        if joins:
            separator = ""
        else:
            separator = " "
        ways = [(length + 1, odd, f"{text}{separator}{parts[end - 1]}")]
        for size in range(1, end // 2 + 1):
            group = parts[end - size : end]
            starts_oddly = not read_sublayer(group[0]).kind.hands_on
            times = 1
            while parts[max(end - size * (times + 1), 0) : end - size * times] == group:
                times += 1
                length, odd, text = best[end - size * times]
                # A repeat counts as one character: x10 is no longer than x9.
                repeat = f"{text} ({''.join(group)})x{times}".lstrip()
                ways.append((length + size + 4, odd + starts_oddly, repeat))
        best.append(min(ways))
    return best[-1][2]
