"""Patterns drawn and changed are always valid, and priced as the price list prices patterns."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.price import latency_of
from lazyformer_fairseq.experiments.search.report.found_pattern import letters
from lazyformer_fairseq.experiments.search.space import Band, Space, bands_of
from lazyformer_fairseq.patterns.grammar import plan

PRICES = {"s": 3.0, "s_read": 3.5, "s[window=4]": 2.0, "l": 1.5, "k": 2.5, "f": 1.0, "rest": 2.0}
CANDIDATES = st.sampled_from(
    [("s", "f"), ("s", "l", "f", "identity"), ("s", "l", "k", "f", "identity"), ("s[window=4]", "s", "l", "identity")]
)
SEEDS = st.integers(0, 10_000)


def space_of(candidates, layers):
    return Space(candidates, layers, PRICES)


def assert_valid(space, path):
    """By the grammar, not by the space itself."""
    assert len(path) == space.layers
    plan(letters(path))  # raises where a consumer has nothing below
    assert space.is_valid(path)
    assert space.latency(path) == pytest.approx(latency_of(PRICES, letters(path)))


@given(CANDIDATES, st.integers(1, 9), SEEDS)
def test_random_patterns_and_their_children_are_valid(candidates, layers, seed):
    space, chance = space_of(candidates, layers), random.Random(seed)
    one, other = space.draw(chance), space.draw(chance)
    assert_valid(space, one)
    changes = list(space.changes(one))
    for path in changes:
        assert_valid(space, path)
        assert sum(a != b for a, b in zip(one, path, strict=True)) == 1
    if changes:
        assert space.mutated(one, chance) in changes
    child = space.crossed(one, other, chance)
    assert_valid(space, child)
    assert all(name in pair for name, *pair in zip(child, one, other, strict=True))


@given(CANDIDATES, st.integers(1, 9), SEEDS)
def test_what_the_grammar_refuses_is_not_valid(candidates, layers, seed):
    space = space_of(candidates, layers)
    path = tuple(random.Random(seed).choices(candidates, k=layers))
    try:
        is_valid = bool(plan(letters(path)))
    except UserError:
        is_valid = False
    assert space.is_valid(path) == is_valid


@given(st.integers(2, 9), SEEDS, st.lists(st.sampled_from([0.5, 0.6, 0.7, 0.8, 0.9, 1.0]), min_size=1, unique=True))
def test_patterns_drawn_for_a_budget_cost_no_more(layers, seed, budgets):
    space, chance = space_of(("s", "l", "f", "identity"), layers), random.Random(seed)
    baseline = latency_of(PRICES, "sf" * layers)
    bands = bands_of(budgets, baseline)
    assert [band.high for band in bands] == pytest.approx([baseline * budget for budget in sorted(budgets)])
    for band in bands:
        path = space.draw_within(band, chance)
        assert_valid(space, path)
        assert space.latency(path) <= band.high


def test_all_of_two_layers_are_drawn_equally_often():
    space, chance = space_of(("s", "l", "f"), 2), random.Random(1)
    drawn = [space.draw(chance) for _ in range(3500)]
    # first s or f; l needs s below: ss sl sf fs ff, and no fl
    assert {path: round(drawn.count(path) / 700, 0) for path in set(drawn)} == dict.fromkeys(
        [("s", "s"), ("s", "l"), ("s", "f"), ("f", "s"), ("f", "f")], 1
    )


def test_a_budget_that_no_pattern_meets_is_named():
    with pytest.raises(UserError, match="--budgets: no pattern .* costs less than 1 ms"):
        space_of(("s", "f"), 4).draw_within(Band(0.5, 1.0), random.Random(1))
