"""Settings of a search, and what a pattern's latency is expected to be and costs."""

import json
import math

import pytest

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search import latency, training
from lazyformer_fairseq.experiments.search.settings import SearchSettings, choose_baseline, read_candidates

PRICES = {"s": 3.0, "f": 1.0, "s_read": 5.0, "l": 2.0, "rest": 0.5}


def test_an_s_costs_more_where_an_l_reads_it():
    assert latency.latency_of(PRICES, "sf(lf)x2 s") == 0.5 + 5 + 1 + 3 + 3 + 3 and latency.latency_of(PRICES, "") == 0.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "not an object; write an object with milliseconds"),
        (json.dumps({"s": 1, "f": 1, "x": 1}), "known names are"),
        (json.dumps({"s": -1, "f": 1}), "field 's' is -1"),
        ('{"s": NaN, "f": 1}', "field 's' is nan"),
        (json.dumps({"s": 1}), "no price for f"),
    ],
)
def test_a_price_list_is_read_and_a_bad_one_refused_by_name(tmp_path, content, message):
    path = tmp_path / "prices.json"
    path.write_text('{"s": 2, "f": 1.5}')
    assert latency.read_price_list(path, ("s", "f")) == {"s": 2, "f": 1.5}
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        latency.read_price_list(path, ("s", "f"))


# --- Settings


def test_the_baseline_is_the_papers_unless_given_and_candidates_are_read_in_one_order():
    assert choose_baseline(None, 4, 32) == "sfsf"
    assert choose_baseline(None, None, 6) == "sfsfsf"
    assert choose_baseline("(sff)x2 f", None, 32) == "sffsfff"
    assert choose_baseline("M2x1", 4, 32) == "sflf"
    assert read_candidates(("identity", "f", "s")) == ("s", "f", "identity")
    assert read_candidates(("l", "f", "s")) == ("s", "l", "f")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: choose_baseline(None, 5, 32), r"--sublayers 5: the baseline \(sf\)x2 cannot have an odd number"),
        (lambda: choose_baseline("sfx", None, 32), "x needs the number of repeats"),
        *((lambda given=given: read_candidates((given,)), "nothing") for given in ("s", "")),
        (lambda: read_candidates(("s,f,x",)), "--candidates s,f,x: 'x' is not a sublayer: use s "),
        (lambda: settings_of(budgets=(0.5, -1.0)), "--budgets -1.0: must be more than 0"),
        (
            lambda: settings_of(budgets=(0.5, 0.9), evaluations=1),
            "--evaluations 1: use at least one for each of the 2 budgets",
        ),
    ],
)
def test_what_the_search_cannot_do_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def settings_of(**given) -> SearchSettings:
    return SearchSettings("data", "masked-lm", "bert_tiny", "sf", **given)


def test_temperature_is_constant_then_decays_exponentially_as_fbnets():
    assert pytest.approx(5 * math.exp(-0.045 * 90), rel=0.01) == training.FINAL_TEMPERATURE  # FBNet's 90 epochs
    settings = settings_of(constant_updates=100, max_updates=300)
    found = [training.temperature_at(update, settings) for update in (0, 100, 200, 300)]
    assert found == pytest.approx([5.0, 5.0, math.sqrt(5.0 * 0.087), 0.087])
