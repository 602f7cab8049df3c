"""The patterns that a search chooses among: how they are written, their latency, the steps from one to another.

And the methods: how a search spends its evaluations among them once the supernet is trained; a function each.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle, pairwise
from typing import NamedTuple, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.latency import Prices, latency_of
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


FIRST_SHARE = 0.3  # of the evaluations goes to random patterns
POPULATION = 8  # of a budget
TOURNAMENT = 4
CROSSED_SHARE = 0.3
PROPOSALS = 20  # times the evaluations: a space with fewer patterns than evaluations must come to an end


class Judge:
    """Answers a pattern's loss; computes each once, and so many as there are evaluations.

    Args:
        loss_of: the loss of a pattern in bits.
        evaluations: how many.
        known: losses from before, which a resumed search takes up: each still counts when a method asks for it.
    """

    def __init__(
        self, loss_of: Callable[[Subnet], float], evaluations: int, known: Optional[dict[Subnet, float]] = None
    ):
        self.loss_of = loss_of
        self.evaluations = evaluations
        self.known = {} if known is None else known
        self.losses: dict[Subnet, float] = {}  # in the order of the evaluations
        self.proposals = 0

    @property
    def is_spent(self) -> bool:
        return len(self.losses) >= self.evaluations or self.proposals >= PROPOSALS * self.evaluations

    def __call__(self, subnet: Subnet) -> float:
        """Bits a prediction; infinite for a new pattern when the evaluations are spent."""
        self.proposals += 1
        if subnet in self.losses:
            return self.losses[subnet]
        if self.is_spent:
            return float("inf")
        if subnet not in self.known:
            self.known[subnet] = self.loss_of(subnet)
        self.losses[subnet] = self.known[subnet]
        return self.losses[subnet]


@dataclass(frozen=True)
class Task:
    """A method's task.

    Attributes:
        bands: of latencies, the lowest first.
        seed: of the method's own choices.
        shares: by band the probabilities (L rows of K) that gradient descent found; None for other methods.
    """

    space: Space
    bands: Sequence[Band]
    judge: Judge
    seed: int
    shares: Optional[Sequence[Sequence[Sequence[float]]]] = None

    def chance(self) -> random.Random:
        return random.Random(self.seed)

    def best_within(self, latency: float) -> Optional[Subnet]:
        """Of the patterns judged so far that cost no more the one of the lowest loss."""
        losses = self.judge.losses
        fitting = [subnet for subnet in losses if self.space.latency(subnet) <= latency]
        return min(fitting, key=losses.__getitem__, default=None)


def judge_by_gradient(task: Task) -> None:
    """Patterns drawn from the probabilities that gradient descent found for each budget, the most probable one first.

    The price on latency only pulls towards a budget: so what is drawn, or most probable, is moved into its band.
    """
    chance, space = task.chance(), task.space
    assert task.shares is not None
    for band, shares in zip(task.bands, task.shares, strict=True):
        first = tuple(most_probable(shares, space.candidates))
        if not space.is_valid(first):  # identity alone
            first = space.draw(chance, shares)
        task.judge(space.moved_into(first, band, chance))
    for band, shares in cycle(zip(task.bands, task.shares, strict=True)):
        if task.judge.is_spent:
            return
        task.judge(space.draw_within(band, chance, lambda shares=shares: space.draw(chance, shares)))


def judge_at_random(task: Task) -> None:
    """Fresh patterns, uniform among those between a budget and the one below it; budgets take turns.

    As the bands are narrow, no draw is wasted on a pattern far below its budget: a control should be strong.
    """
    chance = task.chance()
    for band in cycle(task.bands):
        if task.judge.is_spent:
            return
        task.judge(task.space.draw_within(band, chance))


def judge_by_evolution(task: Task) -> None:
    """Aging evolution (Real et al., 2019, Algorithm 1) with the children of Guo et al. (2020, Algorithm 1).

    Each budget has a population of its own, and they take turns, once the first random patterns are judged. A child has
    one parent, of which it differs in one layer, or two, whose layers it mixes; a parent is the best of a few random
    members; the oldest member dies. A good member of a neighbouring budget may be a parent too, for a pattern that is
    good at 80% is mostly good at 90%.
    """
    chance, judge = task.chance(), task.judge
    populations = [deque(maxlen=POPULATION) for _ in task.bands]
    first = max(len(task.bands), round(FIRST_SHARE * judge.evaluations))
    for number, place in enumerate(cycle(range(len(task.bands)))):
        if judge.is_spent:
            return
        if number < first:
            child = task.space.draw_within(task.bands[place], chance)
        else:
            near = [member for each in populations[max(place - 1, 0) : place + 2] for member in each]
            child = _child(task, near, task.bands[place], chance)
        judge(child)
        if child in judge.losses:
            populations[place].append(child)


def _child(task: Task, members: Sequence[Subnet], band: Band, chance: random.Random) -> Subnet:
    parent = _winner(task, members, chance)
    if chance.random() < CROSSED_SHARE:
        parent = task.space.crossed(parent, _winner(task, members, chance), chance)
    child = task.space.mutated(parent, chance)
    return task.space.moved_into(child, band, chance)


def _winner(task: Task, members: Sequence[Subnet], chance: random.Random) -> Subnet:
    few = chance.sample(list(members), min(TOURNAMENT, len(members)))
    return min(few, key=task.judge.losses.__getitem__)


JUDGING: dict[str, Callable[[Task], None]] = {
    "gradient": judge_by_gradient,
    "random": judge_at_random,
    "evolution": judge_by_evolution,
}
