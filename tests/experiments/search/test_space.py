"""Patterns are always valid, priced as the price list says and read back; draws keep to their budgets."""

import random
from itertools import islice
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search import space as searching
from lazyformer_fairseq.experiments.search.latency import latency_of
from lazyformer_fairseq.patterns.grammar import expand, plan

PRICES = {"s": 3.0, "s_read": 3.5, "s[window=4]": 2.0, "l": 1.5, "k": 2.5, "f": 1.0, "rest": 2.0}
CANDIDATES = st.sampled_from(
    [("s", "f"), ("s", "l", "f", "identity"), ("s", "l", "k", "f", "identity"), ("s[window=4]", "s", "l", "identity")]
)
SEEDS = st.integers(0, 10_000)


def assert_valid(space, subnet):
    """By the grammar, not by the space itself."""
    assert len(subnet) == space.layers
    plan(searching.letters(subnet))  # raises where a consumer has nothing below
    assert space.is_valid(subnet)
    assert space.latency(subnet) == pytest.approx(latency_of(PRICES, searching.letters(subnet)))


@given(CANDIDATES, st.integers(1, 9), SEEDS)
def test_random_patterns_and_what_they_become_are_valid_and_what_the_grammar_refuses_is_not(candidates, layers, seed):
    space, chance = searching.Space(candidates, layers, PRICES), random.Random(seed)
    one = space.draw(chance)
    assert_valid(space, one)
    changes = list(space.changes(one))
    for subnet in changes:
        assert_valid(space, subnet)
        assert sum(a != b for a, b in zip(one, subnet, strict=True)) == 1
    subnet = tuple(random.Random(seed).choices(candidates, k=layers))
    try:
        is_valid = bool(plan(searching.letters(subnet)))
    except UserError:
        is_valid = False
    assert space.is_valid(subnet) == is_valid


@settings(max_examples=10)
@given(st.integers(2, 9), SEEDS, st.lists(st.sampled_from([0.5, 0.6, 0.7, 0.8, 0.9, 1.0]), min_size=1, unique=True))
def test_patterns_drawn_for_a_budget_cost_no_more(layers, seed, budgets):
    space, chance = searching.Space(("s", "l", "f", "identity"), layers, PRICES), random.Random(seed)
    baseline = latency_of(PRICES, "sf" * layers)
    bands = searching.bands_of(budgets, baseline)
    assert [band.high for band in bands] == pytest.approx([baseline * budget for budget in sorted(budgets)])
    for band in bands:
        with mock.patch.object(searching, "DRAWS", 100):
            drawn = list(islice(space.draws(band, chance), 5))
        assert len(set(drawn)) == len(drawn) > 0
        for pattern in drawn:
            plan(pattern)
            assert latency_of(PRICES, pattern) <= band.high


def test_all_of_two_layers_are_drawn_equally_often_and_few_patterns_come_to_an_end():
    space, chance = searching.Space(("s", "l", "f"), 2, PRICES), random.Random(1)
    drawn = [space.draw(chance) for _ in range(3500)]
    # first s or f; l needs s below: ss sl sf fs ff, and no fl
    shares = {"".join(subnet): round(drawn.count(subnet) / 700, 0) for subnet in set(drawn)}
    assert shares == dict.fromkeys(["ss", "sl", "sf", "fs", "ff"], 1)
    few = searching.Space(("s", "identity"), 2, PRICES).draws(searching.Band(0, 99), random.Random(1))
    assert {*few} == {"s", "ss"}
    space = searching.Space(("s", "f", "identity"), 4, PRICES)
    with pytest.raises(UserError, match="--budgets: no 4-layer pattern .* takes less than 1 ms"):
        next(space.draws(searching.Band(0.5, 1.0), random.Random(1)))


NAMES = ("s", "l", "f", "identity")


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), max_size=40),
    *(st.text("sf", max_size=40), st.text("slf", max_size=40), st.integers(1, 6)),
)
def test_what_is_found_can_always_be_planned_and_compact_patterns_are_read_back(rows, start, rest, times):
    chosen = searching.most_probable(rows, NAMES)
    assert len(chosen) == len(rows)
    for pattern in (searching.letters(chosen), "s" + (start + rest) * times):
        assert not pattern or expand(searching.compact(pattern)) == pattern


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
    assert searching.compact(pattern) == expected


def test_a_lazy_layer_without_attention_below_takes_its_next_choice():
    rows = [[0.1, 0.0, 0.8, 0.1], [0.1, 0.5, 0.1, 0.3], [0.9, 0.0, 0.1, 0.0], [0.1, 0.8, 0.1, 0.0]]
    chosen = searching.most_probable(rows, NAMES)
    assert chosen == ["f", "identity", "s", "l"]
    assert (searching.letters(chosen), searching.by_layer(chosen)) == ("fsl", "f-sl")


def test_a_pattern_is_never_empty():
    rows = [[0.2, 0.0, 0.1, 0.7], [0.1, 0.2, 0.1, 0.6]]
    assert searching.most_probable(rows, NAMES) == ["s", "identity"]
