"""Candidates, baseline, temperature; what does not fit is refused."""

import math

import pytest

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search import training
from lazyformer_fairseq.experiments.search.settings import SearchSettings, choose_baseline, read_candidates


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_updates": 10, "constant_updates": 10},
            "--max-updates 10: must be more than the 10 of --constant-updates",
        ),
        ({"budgets": (0.5, -1.0)}, "--budgets 0.5,-1.0: give shares of the baseline's latency above 0"),
        ({"method": "random", "evaluations": 3}, "--evaluations 3: give one for each of 6 budgets at least"),
        ({"method": "chance"}, "--method chance: is one of gradient, random"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        SearchSettings("data", "masked-lm", "bert_tiny", "sf", **given)


def test_temperature_is_constant_then_decays_exponentially_as_fbnets():
    assert pytest.approx(5 * math.exp(-0.045 * 90), rel=0.01) == training.FINAL_TEMPERATURE  # FBNet's 90 epochs
    settings = SearchSettings("data", "masked-lm", "bert_tiny", "sf", constant_updates=100, max_updates=300)
    found = [training.temperature_at(update, settings) for update in (0, 100, 200, 300)]
    assert found == pytest.approx([5.0, 5.0, math.sqrt(5.0 * 0.087), 0.087])


def test_candidates_are_read_in_one_order():
    assert read_candidates(("identity", "f", "s")) == ("s", "f", "identity")
    assert read_candidates(("l", "f", "s")) == ("s", "l", "f")


@pytest.mark.parametrize(
    ("text", "message"), [("s,f,x", "unknown 'x'"), ("l,f", "add s"), ("s", "nothing to choose"), ("", "nothing")]
)
def test_bad_candidates_are_named(text, message):
    with pytest.raises(UserError, match=message):
        read_candidates((text,))
