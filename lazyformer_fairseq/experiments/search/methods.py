"""Methods: how a search spends its evaluations once the supernet is trained; a function each."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Optional

from lazyformer_fairseq.experiments.search.space import Band, Space, Subnet, most_probable

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
