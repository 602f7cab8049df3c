"""What a sublayer may become, and the patterns that are made of it."""

import pytest
from local_mean import LOCAL_MEAN
from trained_encoders import trained

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.from_checkpoint.choices import Choices, default_candidates, read_candidates
from lazyformer_fairseq.experiments.search.from_checkpoint.scores import list_scorings
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
