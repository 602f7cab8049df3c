"""What does not fit together is refused in words."""

import pytest

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.search.schedule import Schedule
from lazyformer_fairseq.search.settings import SearchSettings, choose_baseline


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
