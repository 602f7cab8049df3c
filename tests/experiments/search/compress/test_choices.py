"""What a sublayer may become, the patterns that are made of it, and what a change costs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_mean import LOCAL_MEAN
from trained_encoders import trained

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.compress.choices import (
    Choices,
    default_candidates,
    list_scorings,
    read_candidates,
    scores_of,
    summed,
)
from lazyformer_fairseq.patterns.grammar import expand, places_read, plan
from lazyformer_fairseq.patterns.kinds import ENCODER, registered
from lazyformer_fairseq.warm_start.start import start_from


def choices_of(pattern: str, *names: str, longest: int = 128) -> Choices:
    own = plan(pattern, ENCODER)
    return Choices.of(own, read_candidates(names) if names else default_candidates(own, longest))


def texts(choices: Choices) -> list[list[str]]:
    return [[option.text for option in options] for options in choices.options]


def test_by_default_whatever_takes_the_weights_and_a_feed_forward_for_an_attention():
    s = ["s", "s[window=8]", "s[window=16]", "s[window=32]", "l", "k", "f", "-"]
    assert texts(choices_of("sf")) == [s, ["f", "-"]]
    lazy, windowed = (texts(choices_of(pattern))[-2] for pattern in ("slf", "s[window=8]f"))
    assert lazy == ["l", "s", *s[1:4], "k", "f", "-"]
    assert windowed == ["s[window=8]", "s", *s[2:]]
    assert texts(choices_of("s-f"))[1] == ["-"]
    assert texts(choices_of("sf", "c")) == [["s", "c"], ["f"]]


def test_a_kind_of_somebody_elses_is_a_candidate_where_the_model_has_it():
    with registered(LOCAL_MEAN):
        letter = LOCAL_MEAN.letter
        assert all(letter not in options for options in texts(choices_of("sf")))
        assert texts(choices_of(f"s{letter}"))[1] == [letter, "-"]


def test_candidates_of_the_users_own():
    assert texts(choices_of("sf", "identity", "s[window=3,global=1]")) == [
        ["s", "-", "s[window=3,global=1]"],
        ["f", "-"],
    ]
    with pytest.raises(UserError, match="--candidates: 'x' is no sublayer"):
        read_candidates(["x"])


def test_a_pattern_by_place():
    choices = choices_of("sfsf")
    by_place = ("s", "-", "l", "f")
    assert (choices.pattern(by_place), choices.origins(by_place)) == ("slf", ["0", "2", "3"])
    assert [(made.place, made.producer) for made in choices.made(by_place)] == [(0, None), (2, 0), (3, None)]
    assert choices.origins(("f", "f", "s", "f")) == ["-", "1", "2", "3"]
    assert choices.is_possible(by_place)
    assert not choices.is_possible(("-", "f", "l", "f"))
    assert not choices.is_possible(("-",) * 4)


@pytest.mark.parametrize("pattern", ["ssfs", "sls[window=2]", "skf"])
def test_every_pattern_that_is_scored_starts_from_the_weights(pattern):
    old = trained(pattern)
    choices = Choices.of(old.plan, read_candidates(["s", "l", "k", "s[window=3]", "f", "identity"]))
    for scoring in list_scorings(choices, reach=2):
        start = start_from(
            old, {"sublayer_pattern": choices.pattern(scoring.by_place)}, choices.origins(scoring.by_place)
        )
        places = [made.place for made in choices.made(scoring.by_place)]
        reads = [None if at is None else places[at] for at in places_read(start.new.plan)]
        assert [made.producer for made in choices.made(scoring.by_place)] == reads
        assert choices.pattern(scoring.by_place) == expand(start.new.cfg.sublayer_pattern)


NAMES = ("s[window=2]", "l", "k", "identity")


def possible(choices: Choices) -> list[tuple[str, ...]]:
    every = itertools.product(*([option.text for option in options] for options in choices.options))
    return [by_place for by_place in every if choices.is_possible(by_place)]


@settings(max_examples=10)
@given(st.lists(st.sampled_from("sf"), min_size=1, max_size=4).map("".join), st.randoms())
def test_the_sum_is_the_loss_of_every_pattern_where_changes_do_not_interact(pattern, chance):
    choices = choices_of(pattern, *NAMES)
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
    choices = choices_of(pattern, *NAMES)
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
    choices = choices_of("ssss", "l")
    for reach, expected in ((1, 3), (2, 5), (3, 6)):
        scorings = list_scorings(choices, reach)
        assert sum(scoring.made.text == "l" for scoring in scorings) == expected
        scores = scores_of(choices, scorings, {scoring.by_place: 1.0 for scoring in scorings})
        assert (summed(choices, scores, ("s", "l", "l", "l")) is None) == (reach < 3)


def test_where_those_between_cannot_read_they_go():
    """A k cannot read a synthesizer's keys, so that one that stands between goes; nobody else can take its place."""
    choices = choices_of("ss[synthesizer=random]s", "l", "identity")
    measured = {scoring.made[:3]: scoring.by_place for scoring in list_scorings(choices, 2)}
    assert measured[2, "l", 0] == ("s", "l", "l")
    without = choices_of("sss", "k")
    assert (2, "k", 0) in {scoring.made[:3] for scoring in list_scorings(without, 2)}
