"""Candidates, baseline, and the schedule: temperature and the end of a search; what does not fit is refused."""

import math

import pytest

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.settings import Schedule, SearchSettings, choose_baseline, read_candidates


def test_the_baseline_is_the_papers_unless_given():
    assert choose_baseline(None, 4, 32) == "sfsf"
    assert choose_baseline(None, None, 6) == "sfsfsf"
    assert choose_baseline("(sff)x2 f", None, 32) == "sffsfff"
    assert choose_baseline("M2x1", 4, 32) == "sflf"


@pytest.mark.parametrize(
    ("pattern", "sublayers", "message"),
    [
        (None, 0, "--sublayers 0: a search needs at least one layer"),
        (None, -2, "--sublayers -2"),
        (None, 5, r"--sublayers 5: the baseline \(sf\)x2 cannot have an odd number"),
        ("(sf)x2", 6, "has 4 sublayers, but --sublayers 6"),
        ("sfx", None, "x needs the number of repeats"),
    ],
)
def test_a_baseline_that_the_search_cannot_match_is_refused(pattern, sublayers, message):
    with pytest.raises(UserError, match=message):
        choose_baseline(pattern, sublayers, 32)


def test_a_search_needs_updates_after_the_constant_ones():
    with pytest.raises(UserError, match="--max-updates 10: must be more than the 10 of --constant-updates"):
        SearchSettings("data", "masked-lm", "bert_tiny", "sf", schedule=Schedule(10, 10))


def test_defaults_are_the_papers_and_fbnets():
    schedule = Schedule()
    assert (schedule.constant_updates, schedule.max_updates, schedule.unchanged_share) == (10_000, 50_000, 0.75)
    assert schedule.temperature == 5.0
    assert schedule.final_temperature == pytest.approx(5 * math.exp(-0.045 * 90), rel=0.01)  # FBNet's 90 epochs


def test_temperature_is_constant_then_decays_exponentially():
    schedule = Schedule(100, 300, 4.0, 1.0)
    assert [schedule.temperature_at(update) for update in (0, 100)] == [4.0, 4.0]
    assert schedule.temperature_at(200) == pytest.approx(2.0)
    assert schedule.temperature_at(300) == pytest.approx(1.0)


def test_a_pattern_that_stays_through_three_quarters_of_a_stage_is_found():
    schedule = Schedule()
    assert not schedule.is_converged(29, 40)
    assert schedule.is_converged(30, 40)


def test_the_first_architecture_update_follows_a_whole_epoch_of_weights():
    assert Schedule(constant_updates=10).first_architecture_update(8) == 16
    assert Schedule(constant_updates=0).first_architecture_update(8) == 8


def test_candidates_are_read_in_one_order():
    assert read_candidates("identity, f,s") == ("s", "f", "identity")
    assert read_candidates("l,f,s") == ("s", "l", "f")


@pytest.mark.parametrize(
    ("text", "message"), [("s,f,x", "unknown 'x'"), ("l,f", "add s"), ("s", "nothing to choose"), ("", "nothing")]
)
def test_bad_candidates_are_named(text, message):
    with pytest.raises(UserError, match=message):
        read_candidates(text)
