"""The space of patterns that a search chooses from: validity, latency, sampling, and notation."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.latency import Prices, latency_of
from lazyformer_fairseq.patterns.grammar import read_sublayer, split_sublayers

# A pattern as a path through a supernet: each layer's candidate, including identity, from the lowest layer up.
Subnet = tuple[str, ...]
DRAWS = 2000  # random samples for a latency band; after these, the band is approached step by step
MISSES = 20  # consecutive samples without a new pattern, after which a small space counts as exhausted
ROUNDING = 1e-9  # relative tolerance for sums of the same prices in a different order


class Band(NamedTuple):
    """A latency band from `low` to `high`, in ms, between a budget and the next lower one."""

    low: float
    high: float

    def distance(self, latency: float) -> float:
        """Return the distance from a latency to the band, in ms; 0 inside the band."""
        return max(self.low - latency, latency - self.high, 0.0)


class Space:
    """The valid patterns with a given number of layers.

    A pattern is valid if every sublayer that reads from another one has such a sublayer below it, and at least one
    layer is not identity.

    Args:
        candidates: the names of the candidates, at least two.
        layers: the number of layers per pattern.
        prices: the candidates' prices, in ms.
    """

    def __init__(self, candidates: Sequence[str], layers: int, prices: Prices):
        self.candidates = tuple(candidates)
        self.layers = layers
        self.prices = prices
        self._sublayers = {name: read_sublayer(name) for name in self.candidates}

    def is_valid(self, subnet: Subnet) -> bool:
        """Return whether a subnet is a valid pattern."""
        handed_on: set[str] = set()
        for name in subnet:
            kind = self._sublayers[name].kind
            if kind.reads is not None and kind.reads not in handed_on:
                return False
            handed_on.update(kind.hands_on)
        return not all(self._sublayers[name].kind.is_identity for name in subnet)

    def latency(self, subnet: Subnet) -> float:
        """Return a subnet's latency according to the price list, in ms."""
        return latency_of(self.prices, [self._sublayers[name] for name in subnet])

    def draw(self, chance: random.Random) -> Subnet:
        """Sample a valid pattern uniformly at random."""
        while True:
            subnet = tuple(chance.choices(self.candidates, k=self.layers))
            if self.is_valid(subnet):
                return subnet

    def changes(self, subnet: Subnet) -> Iterator[Subnet]:
        """Yield all valid patterns that differ from a subnet in exactly one layer."""
        for layer, now in enumerate(subnet):
            for name in self.candidates:
                changed = (*subnet[:layer], name, *subnet[layer + 1 :])
                if name != now and self.is_valid(changed):
                    yield changed

    def draw_within(self, band: Band, chance: random.Random) -> Subnet:
        """Sample a pattern with a latency within a band.

        If no sample falls into the band, the nearest sample is changed layer by layer to approach the band. The result
        may then have a lower latency than the band.

        Raises:
            UserError: no pattern was found within the budget.
        """

        def outside(subnet: Subnet) -> float:
            return band.distance(self.latency(subnet))

        subnet = self.draw(chance)
        nearest = subnet
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
                f"--budgets: no {self.layers}-layer pattern of these candidates takes less than {band.high:.3g} ms; "
                "use larger budgets, or faster candidates such as identity"
            )
        return nearest

    def draws(self, band: Band, chance: random.Random) -> Iterator[str]:
        """Yield distinct random patterns from a band, in expanded form, until many consecutive samples find no new one.

        The bands are narrow, so no sample is wasted on a pattern far below its budget.
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
    """Return a latency band for each budget, in increasing order.

    Each band ends where the next one begins; the first is as wide as the narrowest of the others.

    Args:
        budgets: distinct fractions of the baseline's latency.
        baseline: the baseline's latency in ms.
    """
    highs = sorted(baseline * budget * (1 + ROUNDING) for budget in budgets)
    widths = [high - low for low, high in pairwise(highs)]
    lowest = highs[0] - min(widths, default=0.1 * baseline)
    return [Band(low, high) for low, high in pairwise([lowest, *highs])]


def most_probable(probabilities: Sequence[Sequence[float]], candidates: Sequence[str]) -> list[str]:
    """Return each layer's most probable candidate (PAR Transformer, section 2.1), from the lowest layer up.

    A candidate with nothing to read below it is skipped in favor of the next most probable one. If all layers would be
    identity, the first one gets its most probable candidate other than identity.

    Args:
        probabilities: the probability of each candidate, by layer.
        candidates: the names of the candidates.
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
    """Join the chosen candidates into an expanded pattern without identity layers."""
    return "".join(name for name in chosen if not read_sublayer(name).kind.is_identity)


def by_layer(chosen: Sequence[str]) -> str:
    """Join the chosen candidates into a pattern with a ``-`` for each identity layer.

    The n-th sublayer of this pattern is the n-th layer.
    """
    return "".join(read_sublayer(name).text for name in chosen)


def compact(pattern: str) -> str:
    """Shorten an expanded pattern with repeated, non-nested groups: ``sfffsfffff`` becomes ``(sfff)x2 ff``.

    Among equally short results, groups that start with a sublayer that others can read from are preferred, as in the
    paper.
    """
    parts = split_sublayers(pattern)
    best: list[tuple[int, int, str]] = [(0, 0, "")]  # for the first n sublayers: length, number of odd groups, text
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
            begin = end - size
            while parts[max(begin - size, 0) : begin] == group:
                begin -= size
                times += 1
                length, odd, text = best[begin]
                # The repeat count is treated as one character, so that x10 is not longer than x9.
                repeat = f"{text} ({''.join(group)})x{times}".lstrip()
                ways.append((length + size + 4, odd + starts_oddly, repeat))
        best.append(min(ways))
    return best[-1][2]
