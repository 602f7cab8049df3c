"""Methods on a made loss whose best patterns are known: each finds good ones within its budgets and evaluations."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.experiments.search.settings import METHODS
from lazyformer_fairseq.experiments.search.space import JUDGING, Judge, Space, Task, bands_of

PRICES = {"s": 2.0, "l": 1.5, "f": 1.0, "rest": 1.0}
CANDIDATES = ("s", "l", "f", "identity")
LAYERS = 8
BASELINE = ("s", "f") * 4
BUDGETS = (0.5, 0.75, 1.0)


def made_loss(subnet):
    """Attention is worth most at the bottom, feed-forward at the top; identity nothing."""
    worth = {"s": lambda height: 1 - height, "l": lambda height: 0.5 - height / 2, "f": lambda height: 0.4 + height / 2}
    return 10 - sum(worth[name](place / LAYERS) for place, name in enumerate(subnet) if name in worth)


def judged(method, seed, evaluations=90, **more):
    space = Space(CANDIDATES, LAYERS, PRICES)
    judge = Judge(made_loss, evaluations)
    task = Task(space, bands_of(BUDGETS, space.latency(BASELINE)), judge, seed, **more)
    JUDGING[method](task)
    return task


def losses_within_budgets(task):
    return [made_loss(task.best_within(band.high)) for band in task.bands]


SHARES = [[[0.25] * len(CANDIDATES)] * LAYERS] * len(BUDGETS)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=5)
@given(seed=st.integers(0, 1000))
def test_a_method_keeps_to_its_evaluations_and_repeats_itself(method, seed):
    more = {"shares": SHARES} if method == "gradient" else {}
    task, again = (judged(method, seed, evaluations=30, **more) for _ in range(2))
    assert 10 <= len(task.judge.losses) <= 30
    assert list(task.judge.losses) == list(again.judge.losses)
    assert all(task.space.is_valid(subnet) for subnet in task.judge.losses)


def test_evolution_beats_random_search_in_the_mean():
    seeds = range(8)

    def mean(name):
        return [
            sum(each) / len(seeds)
            for each in zip(*(losses_within_budgets(judged(name, s)) for s in seeds), strict=True)
        ]

    ours, random_ones = mean("evolution"), mean("random")
    assert all(our < random_one for our, random_one in zip(ours, random_ones, strict=True)), (ours, random_ones)


@given(seed=st.integers(0, 1000), losses=st.lists(st.floats(0, 10), min_size=1, max_size=20))
def test_a_front_is_monotone(seed, losses):
    """More latency is never worse, whatever was judged."""
    space, chance, given_losses = Space(CANDIDATES, LAYERS, PRICES), random.Random(seed), iter(losses)
    judge = Judge(lambda subnet: next(given_losses), len(losses))
    for _ in losses:
        judge(space.draw(chance))
    task = Task(space, bands_of(BUDGETS, space.latency(BASELINE)), judge, seed)
    latencies = sorted({space.latency(subnet) for subnet in judge.losses})
    front = [judge.losses[task.best_within(latency)] for latency in latencies]
    assert front == sorted(front, reverse=True)
    assert front[-1] == min(judge.losses.values())
    assert task.best_within(latencies[0] - 0.1) is None


def test_gradient_judges_each_budgets_most_probable_pattern_first():
    sure = [[[0.97 if name == best else 0.01 for name in CANDIDATES] for best in BASELINE]] * len(BUDGETS)
    task = judged("gradient", 1, evaluations=6, shares=sure)
    first = list(task.judge.losses)[len(BUDGETS) - 1]
    assert first == BASELINE  # of the budget of 1.0 it fits as it is
    assert losses_within_budgets(task)[-1] <= made_loss(BASELINE)


def test_a_space_of_few_patterns_comes_to_an_end():
    space = Space(("s", "f"), 1, PRICES)
    judge = Judge(lambda subnet: 1.0, 50)
    JUDGING["random"](Task(space, bands_of((1.0,), 3.0), judge, 1))
    JUDGING["evolution"](Task(space, bands_of((1.0,), 3.0), Judge(lambda subnet: 1.0, 50), 1))
    assert set(judge.losses) <= {("s",), ("f",)}


def test_a_judge_computes_nothing_twice_and_counts_what_is_known():
    calls = []
    known = {("s", "f"): 3.0}
    judge = Judge(lambda subnet: calls.append(subnet) or 5.0, 2, known)
    assert (judge(("s", "f")), judge(("f", "s")), judge(("f", "s"))) == (3.0, 5.0, 5.0)
    assert calls == [("f", "s")] and judge.is_spent and judge(("f", "f")) == float("inf")
    assert known == {("s", "f"): 3.0, ("f", "s"): 5.0}
