"""Aging evolution (Real et al., 2019, Algorithm 1) with the children of Guo et al. (2020, Algorithm 1).

Each budget has a population of its own, and they take turns. A child has one parent, of which it differs in one layer,
or two, whose layers it mixes; a parent is the best of a few random members; the oldest member dies. A good member of a
neighbouring budget may be a parent too, for a pattern that is good at 80% is mostly good at 90%.
"""

import random
from collections import deque
from collections.abc import Sequence
from itertools import cycle

from lazyformer_fairseq.experiments.search.methods.task import Task
from lazyformer_fairseq.experiments.search.space import Band, Path

FIRST_SHARE = 0.3  # of the evaluations goes to random patterns
POPULATION = 8  # of a budget
TOURNAMENT = 4
CROSSED_SHARE = 0.3


def judge_patterns(task: Task) -> None:
    """Evaluates children, budget by budget in turn, once the first random patterns are judged."""
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


def _child(task: Task, members: Sequence[Path], band: Band, chance: random.Random) -> Path:
    parent = _winner(task, members, chance)
    if chance.random() < CROSSED_SHARE:
        parent = task.space.crossed(parent, _winner(task, members, chance), chance)
    child = task.space.mutated(parent, chance)
    return task.space.moved_into(child, band, chance)


def _winner(task: Task, members: Sequence[Path], chance: random.Random) -> Path:
    few = chance.sample(list(members), min(TOURNAMENT, len(members)))
    return min(few, key=task.judge.losses.__getitem__)
