"""The patterns that a search chooses among: how they are written, their latency, the steps from one to another."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from typing import NamedTuple, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.latency import READ, REST, Prices
from lazyformer_fairseq.experiments.search.settings import candidate_name
from lazyformer_fairseq.patterns.grammar import read_sublayer, split_sublayers

# A pattern as a part of a supernet: the candidate of each layer, the lowest first; identity included.
Subnet = tuple[str, ...]
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

    def is_valid(self, subnet: Subnet) -> bool:
        handed_on: set[str] = set()
        for name in subnet:
            kind = self._kinds[name]
            if kind.reads is not None and kind.reads not in handed_on:
                return False
            handed_on.update(kind.hands_on)
        return not all(self._kinds[name].is_identity for name in subnet)

    def latency(self, subnet: Subnet) -> float:
        """Milliseconds by the price list; the same as `latency_of`."""
        total, read = self.prices.get(REST, 0.0), set()
        for name in reversed(subnet):
            kind, text = self._kinds[name], self._texts[name]
            alone = self.prices.get(text, 0.0)
            is_read = any(what in read for what in kind.kept_for_consumers)
            total += self.prices.get(text + READ, alone) if is_read else alone
            read.difference_update(kind.hands_on)
            if kind.reads is not None:
                read.add(kind.reads)
        return total

    def draw(self, chance: random.Random, shares: Optional[Sequence[Sequence[float]]] = None) -> Subnet:
        """A random valid pattern: uniform, or layer by layer by `shares` (L rows of K), if these yield one."""
        for number in count():
            if shares is None or number >= DRAWS:
                subnet = tuple(chance.choices(self.candidates, k=self.layers))
            else:
                subnet = tuple(chance.choices(self.candidates, row)[0] for row in shares)
            if self.is_valid(subnet):
                return subnet

    def mutated(self, subnet: Subnet, chance: random.Random) -> Subnet:
        """A valid pattern that differs in one layer, chosen uniformly among those that do."""
        return chance.choice(list(self.changes(subnet)))

    def changes(self, subnet: Subnet) -> Iterator[Subnet]:
        """All valid patterns that differ in one layer."""
        for layer, now in enumerate(subnet):
            for name in self.candidates:
                changed = (*subnet[:layer], name, *subnet[layer + 1 :])
                if name != now and self.is_valid(changed):
                    yield changed

    def crossed(self, one: Subnet, other: Subnet, chance: random.Random) -> Subnet:
        """Each layer from either parent; a mixture that is not valid is drawn again, and `one` stands for none."""
        for _ in range(20):
            subnet = tuple(chance.choice(pair) for pair in zip(one, other, strict=True))
            if self.is_valid(subnet):
                return subnet
        return one

    def draw_within(self, band: Band, chance: random.Random, draw: Optional[Callable[[], Subnet]] = None) -> Subnet:
        """A random pattern whose latency lies in the band; where draws do not reach it, changes of one do.

        Args:
            draw: uniform by default.

        Raises:
            UserError: no pattern is cheap enough.
        """
        draw = draw or (lambda: self.draw(chance))
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


def subnet_of(text: str) -> Subnet:
    """The candidates of a pattern written out by layer, such as ``sf-f``."""
    return tuple(candidate_name(read_sublayer(part)) for part in split_sublayers(text))


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
