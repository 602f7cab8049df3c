"""The best patterns under a budget, against all patterns there are, tried one by one."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.compress.choices import Choices, Made, best_choices, list_scorings
from lazyformer_fairseq.experiments.search.latency import latency_of
from lazyformer_fairseq.patterns.grammar import places_read, plan, read_sublayer
from lazyformer_fairseq.patterns.kinds import ENCODER

# A k cannot read the keys of a synthesizer.
NAMES = ("s", "l", "k", "s[synthesizer=random]", "identity")


def choices_of(pattern: str, names=NAMES) -> Choices:
    return Choices.of(plan(pattern, ENCODER), [read_sublayer(name) for name in names])


def by_force(choices: Choices, scores, ticks, limit: int) -> list[tuple[float, int]]:
    """(sum, ticks) of all patterns within the limit, the least first; from the text of each, not from states."""
    found = []
    for texts in itertools.product(*([option.text for option in options] for options in choices.options)):
        stay = [place for place, text in enumerate(texts) if text != "-"]
        try:
            planned = plan("".join(texts[place] for place in stay), ENCODER)
        except UserError:
            continue
        reads = {stay[n]: None if at is None else stay[at] for n, at in enumerate(places_read(planned))}
        keys = [Made(place, text, reads.get(place)) for place, text in enumerate(texts)]
        latency = latency_of(ticks, "".join(texts).replace("-", ""))
        if latency <= limit and all(key in scores for key in keys):
            found.append((sum(scores[key] for key in keys), latency))
    return sorted(found)


patterns = st.lists(st.sampled_from(["s", "f", "l", "k", "-"]), max_size=3).map(lambda rest: "".join(["s", *rest]))
ticks_of = st.fixed_dictionaries(
    {name: st.integers(0, 9) for name in (*NAMES[:-1], "f", "s_read", "s[synthesizer=random]_read")}
)


@settings(max_examples=10, deadline=None)
@given(patterns, ticks_of, st.integers(1, 3), st.lists(st.integers(1, 60), min_size=1, max_size=3), st.randoms())
def test_the_best_of_all_patterns(pattern, ticks, reach, limits, chance):
    choices = choices_of(pattern)
    ticks = ticks | {"rest": 1}
    scores = {scoring.made: chance.uniform(-0.2, 1) for scoring in list_scorings(choices, reach)}
    found = best_choices(choices, scores, ticks, limits, count=3)
    for limit, best in zip(limits, found, strict=True):
        expected = by_force(choices, scores, ticks, limit)
        assert [each.score for each in best] == pytest.approx([score for score, _ in expected[:3]])
        assert len({each.by_place for each in best}) == len(best)
        for each in best:
            assert latency_of(ticks, choices.pattern(each.by_place)) == each.ticks <= limit
            assert choices.is_possible(each.by_place)


@pytest.mark.parametrize(("read", "limit", "best"), [(4, 7, "sflf"), (5, 8, "sflf"), (5, 7, None), (6, 8, "sfsf")])
def test_a_distribution_that_is_kept_is_paid_once_and_where_it_is_read(read, limit, best):
    choices = choices_of("sfsf", ("l",))
    scores = {Made(0, "s", None): 0, Made(1, "f", None): 0, Made(2, "s", None): 1, Made(3, "f", None): 0}
    scores[Made(2, "l", 0)] = 0.5
    (found,) = best_choices(choices, scores, {"s": 3, "f": 1, "l": 1, "s_read": read, "rest": 0}, [limit])
    assert [choices.pattern(each.by_place) for each in found] == ([best] if best else [])


def test_the_empty_pattern_is_none():
    choices = choices_of("sf", ("identity",))
    scores = {scoring.made: 0.0 for scoring in list_scorings(choices, 1)}
    ((found,),) = best_choices(choices, scores, {"s": 1, "s_read": 1, "f": 1, "rest": 1}, [2])
    assert choices.pattern(found.by_place) in ("s", "f")
