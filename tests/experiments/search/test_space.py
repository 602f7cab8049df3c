"""Patterns drawn, changed and found are always valid, priced as the price list prices patterns, and read back."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.latency import latency_of
from lazyformer_fairseq.experiments.search.space import (
    Band,
    Space,
    bands_of,
    by_layer,
    compact,
    letters,
    most_probable,
)
from lazyformer_fairseq.patterns.grammar import expand, plan

PRICES = {"s": 3.0, "s_read": 3.5, "s[window=4]": 2.0, "l": 1.5, "k": 2.5, "f": 1.0, "rest": 2.0}
CANDIDATES = st.sampled_from(
    [("s", "f"), ("s", "l", "f", "identity"), ("s", "l", "k", "f", "identity"), ("s[window=4]", "s", "l", "identity")]
)
SEEDS = st.integers(0, 10_000)


def space_of(candidates, layers):
    return Space(candidates, layers, PRICES)


def assert_valid(space, subnet):
    """By the grammar, not by the space itself."""
    assert len(subnet) == space.layers
    plan(letters(subnet))  # raises where a consumer has nothing below
    assert space.is_valid(subnet)
    assert space.latency(subnet) == pytest.approx(latency_of(PRICES, letters(subnet)))


@given(CANDIDATES, st.integers(1, 9), SEEDS)
def test_random_patterns_and_their_children_are_valid(candidates, layers, seed):
    space, chance = space_of(candidates, layers), random.Random(seed)
    one, other = space.draw(chance), space.draw(chance)
    assert_valid(space, one)
    changes = list(space.changes(one))
    for subnet in changes:
        assert_valid(space, subnet)
        assert sum(a != b for a, b in zip(one, subnet, strict=True)) == 1
    if changes:
        assert space.mutated(one, chance) in changes
    child = space.crossed(one, other, chance)
    assert_valid(space, child)
    assert all(name in pair for name, *pair in zip(child, one, other, strict=True))


@given(CANDIDATES, st.integers(1, 9), SEEDS)
def test_what_the_grammar_refuses_is_not_valid(candidates, layers, seed):
    space = space_of(candidates, layers)
    subnet = tuple(random.Random(seed).choices(candidates, k=layers))
    try:
        is_valid = bool(plan(letters(subnet)))
    except UserError:
        is_valid = False
    assert space.is_valid(subnet) == is_valid


@settings(max_examples=10)
@given(st.integers(2, 9), SEEDS, st.lists(st.sampled_from([0.5, 0.6, 0.7, 0.8, 0.9, 1.0]), min_size=1, unique=True))
def test_patterns_drawn_for_a_budget_cost_no_more(layers, seed, budgets):
    space, chance = space_of(("s", "l", "f", "identity"), layers), random.Random(seed)
    baseline = latency_of(PRICES, "sf" * layers)
    bands = bands_of(budgets, baseline)
    assert [band.high for band in bands] == pytest.approx([baseline * budget for budget in sorted(budgets)])
    for band in bands:
        subnet = space.draw_within(band, chance)
        assert_valid(space, subnet)
        assert space.latency(subnet) <= band.high


def test_all_of_two_layers_are_drawn_equally_often():
    space, chance = space_of(("s", "l", "f"), 2), random.Random(1)
    drawn = [space.draw(chance) for _ in range(3500)]
    # first s or f; l needs s below: ss sl sf fs ff, and no fl
    assert {subnet: round(drawn.count(subnet) / 700, 0) for subnet in set(drawn)} == dict.fromkeys(
        [("s", "s"), ("s", "l"), ("s", "f"), ("f", "s"), ("f", "f")], 1
    )


def test_a_budget_that_no_pattern_meets_is_named():
    with pytest.raises(UserError, match="--budgets: no pattern .* costs less than 1 ms"):
        space_of(("s", "f"), 4).draw_within(Band(0.5, 1.0), random.Random(1))


NAMES = ("s", "l", "f", "identity")
PROBABILITIES = st.lists(st.floats(0, 1), min_size=4, max_size=4)


@given(st.lists(PROBABILITIES, max_size=40))
def test_what_is_found_can_always_be_planned(rows):
    chosen = most_probable(rows, NAMES)
    found = letters(chosen)
    assert len(chosen) == len(rows)
    if found:
        assert expand(compact(found)) == found


@given(st.text("sf", max_size=40), st.text("slf", max_size=40), st.integers(1, 6))
def test_compact_patterns_are_read_back(start, rest, times):
    pattern = "s" + (start + rest) * times
    assert expand(compact(pattern)) == pattern


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("sfff" * 6 + "f" * 8, "(sfff)x6 (f)x8"),
        ("sf" * 16, "(sf)x16"),
        ("s" * 6 + "sf" * 10 + "f" * 6, "(s)x6 (sf)x10 (f)x6"),
        ("sfflff" * 3 + "f" * 6, "(sfflff)x3 (f)x6"),
        ("sffs", "sffs"),
        ("", ""),
    ],
)
def test_the_papers_patterns_are_written_as_the_paper_does(pattern, expected):
    assert compact(pattern) == expected


def test_a_lazy_layer_without_attention_below_takes_its_next_choice():
    rows = [[0.1, 0.0, 0.8, 0.1], [0.1, 0.5, 0.1, 0.3], [0.9, 0.0, 0.1, 0.0], [0.1, 0.8, 0.1, 0.0]]
    chosen = most_probable(rows, NAMES)
    assert chosen == ["f", "identity", "s", "l"]
    assert letters(chosen) == "fsl"
    assert by_layer(chosen) == "f-sl"


def test_shares_of_identity_alone_come_to_an_end():
    space = space_of(("s", "f", "identity"), 4)
    assert_valid(space, space.draw(random.Random(1), [[0.0, 0.0, 1.0]] * 4))
