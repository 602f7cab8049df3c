"""Scores of changes: exact where losses are sums, and over one lazy block in any case."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.experiments.search.from_checkpoint.choices import Choices
from lazyformer_fairseq.experiments.search.from_checkpoint.scores import list_scorings, scores_of, summed
from lazyformer_fairseq.patterns.grammar import plan, read_sublayer
from lazyformer_fairseq.patterns.kinds import ENCODER

NAMES = ("s[window=2]", "l", "k", "identity")


def choices_of(pattern: str, names=NAMES) -> Choices:
    return Choices.of(plan(pattern, ENCODER), [read_sublayer(name) for name in names])


def possible(choices: Choices) -> list[tuple[str, ...]]:
    every = itertools.product(*([option.text for option in options] for options in choices.options))
    return [by_place for by_place in every if choices.is_possible(by_place)]


@settings(max_examples=10)
@given(st.lists(st.sampled_from("sf"), min_size=1, max_size=4).map("".join), st.randoms())
def test_the_sum_is_the_loss_of_every_pattern_where_changes_do_not_interact(pattern, chance):
    choices = choices_of(pattern)
    if not choices.is_possible(choices.own):
        return
    costs: dict = {}

    def above(by_place) -> float:
        changed = [made for made in choices.all_made(by_place) if made.text != choices.own[made.place]]
        return sum(costs.setdefault(made, chance.uniform(-1, 1)) for made in changed)

    scorings = list_scorings(choices, reach=len(pattern))
    scores = scores_of(choices, scorings, {scoring.by_place: above(scoring.by_place) for scoring in scorings})
    for by_place in possible(choices):
        assert summed(choices, scores, by_place) == pytest.approx(above(by_place), abs=1e-9)


@settings(max_examples=10)
@given(st.sampled_from(["ssss", "sfsfsf", "fssfs"]), st.sampled_from("lk"), st.randoms())
def test_the_sum_over_one_lazy_block_is_its_loss_whatever_losses_are(pattern, letter, chance):
    choices = choices_of(pattern)
    losses: dict = {choices.own: 0.0}
    scorings = list_scorings(choices, reach=3)
    for scoring in scorings:
        losses.setdefault(scoring.by_place, chance.uniform(-1, 1))
    scores = scores_of(choices, scorings, losses)
    attentions = [place for place, text in enumerate(pattern) if text == "s"]
    for first, last in itertools.combinations(range(len(attentions)), 2):
        block = list(pattern)
        for place in attentions[first + 1 : last + 1]:
            block[place] = letter
        assert summed(choices, scores, tuple(block)) == pytest.approx(losses[tuple(block)])


def test_reach_limits_what_is_measured_and_chosen():
    choices = choices_of("ssss", ("l",))
    for reach, expected in ((1, 3), (2, 5), (3, 6)):
        scorings = list_scorings(choices, reach)
        assert sum(scoring.made.text == "l" for scoring in scorings) == expected
        scores = scores_of(choices, scorings, {scoring.by_place: 1.0 for scoring in scorings})
        assert (summed(choices, scores, ("s", "l", "l", "l")) is None) == (reach < 3)


def test_where_those_between_cannot_read_they_go():
    """A k cannot read a synthesizer's keys, so that one that stands between goes; nobody else can take its place."""
    choices = choices_of("ss[synthesizer=random]s", ("l", "identity"))
    measured = {scoring.made[:3]: scoring.by_place for scoring in list_scorings(choices, 2)}
    assert measured[2, "l", 0] == ("s", "l", "l")
    without = choices_of("sss", ("k",))
    assert (2, "k", 0) in {scoring.made[:3] for scoring in list_scorings(without, 2)}
