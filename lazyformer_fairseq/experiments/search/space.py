"""The patterns that a search chooses among: how they are written, their latency, how they are drawn."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from typing import NamedTuple, Optional

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
        self._sublayers = {name: read_sublayer(name) for name in self.candidates}

    def is_valid(self, subnet: Subnet) -> bool:
        handed_on: set[str] = set()
        for name in subnet:
            kind = self._sublayers[name].kind
            if kind.reads is not None and kind.reads not in handed_on:
                return False
            handed_on.update(kind.hands_on)
        return not all(self._sublayers[name].kind.is_identity for name in subnet)

    def latency(self, subnet: Subnet) -> float:
        """Milliseconds by the price list."""
        return latency_of(self.prices, [self._sublayers[name] for name in subnet])

    def draw(self, chance: random.Random, shares: Optional[Sequence[Sequence[float]]] = None) -> Subnet:
        """A random valid pattern: uniform, or layer by layer by `shares` (L rows of K), if these yield one."""
        for number in count():
            if shares is None or number >= DRAWS:
                subnet = tuple(chance.choices(self.candidates, k=self.layers))
            else:
                subnet = tuple(chance.choices(self.candidates, row)[0] for row in shares)
            if self.is_valid(subnet):
                return subnet

    def changes(self, subnet: Subnet) -> Iterator[Subnet]:
        """All valid patterns that differ in one layer."""
        for layer, now in enumerate(subnet):
            for name in self.candidates:
                changed = (*subnet[:layer], name, *subnet[layer + 1 :])
                if name != now and self.is_valid(changed):
                    yield changed

    def draw_within(self, band: Band, chance: random.Random, draw: Callable[[], Subnet]) -> Subnet:
        """A random pattern whose latency lies in the band; where draws do not reach it, changes of one do.

        Raises:
            UserError: no pattern is cheap enough.
        """
        nearest = subnet = draw()
        for _ in range(DRAWS):
            if band.distance(self.latency(subnet)) == 0:
                return subnet
            nearest = min(nearest, subnet, key=self._outside(band))
            subnet = draw()
        return self.moved_into(nearest, band, chance)

    def moved_into(self, subnet: Subnet, band: Band, chance: random.Random) -> Subnet:
        """The pattern, changed a layer at a time towards the band until none comes nearer.

        Raises:
            UserError: it is more expensive than the band then.
        """
        outside = self._outside(band)
        while outside(subnet) > 0:
            found = list(self.changes(subnet))
            chance.shuffle(found)
            nearest = min(found, key=outside)
            if outside(nearest) >= outside(subnet):
                break
            subnet = nearest
        if self.latency(subnet) > band.high:
            raise UserError(
                f"--budgets: no pattern of these candidates with {self.layers} layers costs less than {band.high:.3g} "
                "ms; give higher budgets, or cheaper candidates such as identity"
            )
        return subnet

    def _outside(self, band: Band) -> Callable[[Subnet], float]:
        return lambda subnet: band.distance(self.latency(subnet))


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


def most_probable(probabilities: Sequence[Sequence[float]], candidates: Sequence[str]) -> list[str]:
    """The most probable candidate of each layer (PAR Transformer, section 2.1), the lowest layer first.

    A layer skips candidates that have nothing below to read, and takes its next most probable one.
    """
    kinds = {name: read_sublayer(name).kind for name in candidates}
    chosen: list[str] = []
    handed_on: set[str] = set()
    for row in probabilities:
        possible = [
            (probability, -number, name)
            for number, (name, probability) in enumerate(zip(candidates, row, strict=True))
            if kinds[name].reads is None or kinds[name].reads in handed_on
        ]
        chosen.append(max(possible)[2])
        handed_on.update(kinds[chosen[-1]].hands_on)
    return chosen


def letters(chosen: Sequence[str]) -> str:
    """The pattern written out, without identity layers."""
    return "".join(name for name in chosen if not read_sublayer(name).kind.is_identity)


def by_layer(chosen: Sequence[str]) -> str:
    """The same with a ``-`` for each identity layer, so that the n-th sublayer is the n-th layer."""
    return "".join(read_sublayer(name).text for name in chosen)


def compact(pattern: str) -> str:
    """A written-out pattern, with repeats of plain groups: ``sfffsfffff`` is ``(sfff)x2 ff``.

    Among equally short ones it prefers groups that start with a sublayer that hands something on, as in the paper.
    """
    parts = split_sublayers(pattern)
    best: list[tuple[int, int, str]] = [(0, 0, "")]  # of the first n sublayers: length, odd groups, text
    for end in range(1, len(parts) + 1):
        length, odd, text = best[end - 1]
        joins = not text or text[-1].isalpha() or text[-1] in "]-"
        ways = [(length + 1, odd, text + parts[end - 1] if joins else f"{text} {parts[end - 1]}")]
        for size in range(1, end // 2 + 1):
            group, times = parts[end - size : end], 1
            while parts[max(end - size * (times + 1), 0) : end - size * times] == group:
                times += 1
                length, odd, text = best[end - size * times]
                starts_oddly = not read_sublayer(group[0]).kind.hands_on
                # A repeat counts as one character: x10 is no longer than x9.
                repeat = f"{text} ({''.join(group)})x{times}".lstrip()
                ways.append((length + size + 4, odd + starts_oddly, repeat))
        best.append(min(ways))
    return best[-1][2]


def draws(
    space: Space, band: Band, chance: random.Random, shares: Optional[Sequence[Sequence[float]]] = None
) -> Iterator[Subnet]:
    """Yields patterns of a band, as models each once, until many draws in a row find no new one.

    Uniform; or by the probabilities `shares` (L rows of K) that gradient descent found, the most probable one first.
    The price on latency only pulls towards a budget: so that one is moved into its band. As the bands are narrow, no
    draw is wasted on a pattern far below its budget.
    """
    draw, known, misses = (lambda: space.draw(chance, shares)), set[str](), 0
    if shares is None:
        subnet = space.draw_within(band, chance, draw)
    else:
        first = tuple(most_probable(shares, space.candidates))
        subnet = space.moved_into(first if space.is_valid(first) else draw(), band, chance)  # not identity alone
    while misses < MISSES:
        misses = misses + 1 if letters(subnet) in known else 0
        if not misses:
            known.add(letters(subnet))
            yield subnet
        subnet = space.draw_within(band, chance, draw)
