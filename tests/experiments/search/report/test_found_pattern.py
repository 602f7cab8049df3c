"""From probabilities to a pattern string that fits --sublayer-pattern."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.experiments.search.report.found_pattern import by_layer, compact, letters, most_probable
from lazyformer_fairseq.patterns.grammar import expand

CANDIDATES = ("s", "l", "f", "identity")
PROBABILITIES = st.lists(st.floats(0, 1), min_size=4, max_size=4)


@given(st.lists(PROBABILITIES, max_size=40))
def test_what_is_found_can_always_be_planned(rows):
    chosen = most_probable(rows, CANDIDATES)
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
    chosen = most_probable(rows, CANDIDATES)
    assert chosen == ["f", "identity", "s", "l"]
    assert letters(chosen) == "fsl"
    assert by_layer(chosen) == "f-sl"
