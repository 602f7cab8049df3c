"""Losses are measured once, with their errors; few patterns of each budget are measured, and as many random ones."""

import numpy as np
import pytest

from lazyformer_fairseq.experiments.search.compress.budgets import Budgets, Measured, compare
from lazyformer_fairseq.experiments.search.compress.choices import Choices
from lazyformer_fairseq.patterns.grammar import plan, read_sublayer
from lazyformer_fairseq.patterns.kinds import ENCODER
from lazyformer_fairseq.warm_start.losses import BlockLosses

TICKS = {"s": 10, "s_read": 12, "l": 4, "f": 5, "rest": 1}


class GivenLosses(dict):
    """By a function of the pattern."""

    def __init__(self, above):
        self.above = above

    def measure(self, patterns, description):
        self.update({each: Measured(self.above(each), 0.0) for each in patterns})


def budgets_of(pattern: str, above, limits, names=("l", "identity")) -> Budgets:
    choices = Choices.of(plan(pattern, ENCODER), [read_sublayer(name) for name in names])
    return Budgets(choices, GivenLosses(above), TICKS, limits)


def test_the_best_that_was_measured_within_the_budget():
    def above(by_place):
        costs = (3, 1, 3, 2)
        return sum(costs[place] for place, text in enumerate(by_place) if text == "-") + 0.1 * by_place.count("l")

    budgets = budgets_of("sfsf", above, [31, 27, 23])
    budgets.score()
    budgets.find(top=1)
    assert [budgets.choices.pattern(budgets.best(limit)) for limit in budgets.limits] == ["sfsf", "sflf", "slf"]
    assert budgets.sum_of(budgets.best(23)) == pytest.approx(1.1)


def test_a_second_round_finds_what_sums_hide():
    """Alone each f seems to cost little; the lower two cost much where both go."""

    def above(by_place):
        single = {0: 9.0, 1: 0.1, 2: 0.2, 3: 0.3}
        cost = sum(single[place] for place, text in enumerate(by_place) if text == "-")
        return cost + (5.0 if by_place[1] == by_place[2] == "-" else 0.0)

    budgets = budgets_of("sfff", above, [16], ("identity",))
    budgets.score()
    for find, best in ((budgets.find, 5.3), (budgets.find_again, 0.4)):
        find(top=1)
        assert budgets.losses[budgets.best(16)].above == pytest.approx(best)


def test_the_error_is_that_of_the_mean_where_blocks_are_alike():
    chance = np.random.default_rng(1)
    original, gains = chance.uniform(5, 9, 50), chance.normal(0.2, 1, 50)
    found = compare(BlockLosses(original + gains, np.full(50, 7)), BlockLosses(original, np.full(50, 7)))
    bits = gains / 7 / np.log(2)
    assert found == pytest.approx((bits.mean(), bits.std(ddof=1) / np.sqrt(50)))
