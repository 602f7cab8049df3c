"""Alignments against all that there are, and those that a reader would draw."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.warm_start.start import align, given_alignment, left_out, likeness

sublayers = st.sampled_from(["s", "f", "l", "k", "s[window=2]", "-"])
patterns = st.lists(sublayers, max_size=5).map(lambda rest: "".join(["s", *rest]))


def value(pairs, old, new) -> tuple[int, int, float]:
    """What an alignment is judged by, straight from its description."""
    rows, columns = ([at for at, each in enumerate(plan_) if not each.kind.is_identity] for plan_ in (old, new))
    depth = sum(((rows.index(i) + 0.5) / len(rows) - (columns.index(j) + 0.5) / len(columns)) ** 2 for i, j in pairs)
    return len(pairs), sum(likeness(old[i], new[j]) for i, j in pairs), -round(depth, 9)


def all_alignments(old, new):
    for count in range(min(len(old), len(new)) + 1):
        for rows in combinations(range(len(old)), count):
            for columns in combinations(range(len(new)), count):
                pairs = list(zip(rows, columns, strict=True))
                if all(likeness(old[i], new[j]) and not old[i].kind.is_identity for i, j in pairs):
                    yield pairs


@settings(max_examples=60)
@given(patterns, patterns)
def test_no_other_alignment_is_better(one, other):
    old, new = plan(one), plan(other)
    found = [(i, j) for j, i in enumerate(align(old, new)) if i is not None]
    assert found == sorted(found) and all(likeness(old[i], new[j]) for i, j in found)
    assert value(found, old, new) == max(value(pairs, old, new) for pairs in all_alignments(old, new))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("(sf)x4", "M2x2", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("M2x2", "(sf)x4", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("(sf)x4", "(sf)x2", [0, 3, 4, 7]),
        ("(sf)x2", "(sf)x4", [0, None, None, 1, 2, None, None, 3]),
        ("(sf)x3", "(sff)x2 f", [0, 1, None, 2, 3, None, 5]),
        ("s-fsf", "sf-sf", [0, 2, None, 3, 4]),
        ("s[window=2]fsf", "sf", [2, 3]),
    ],
)
def test_places_that_a_reader_expects(old, new, expected):
    assert list(align(plan(old), plan(new))) == expected


@given(patterns)
def test_a_pattern_aligns_with_itself_place_by_place(pattern):
    sublayers = plan(pattern)
    expected = [None if each.kind.is_identity else place for place, each in enumerate(sublayers)]
    assert list(align(sublayers, sublayers)) == expected and left_out(sublayers, tuple(expected)) == []


def test_the_users_own_alignment():
    old, new = plan("sfsf"), plan("sf-lf")
    assert given_alignment(["2", "1", "-", "0", "-"], old, new) == (2, 1, None, 0, None)
    for words, message in (
        (["0", "1"], "--from-sublayers: 2 given, but the new pattern has 5 sublayers"),
        (["0", "1", "-", "2", "4"], "'4' is no sublayer of the old pattern, 0 to 3, nor -"),
        (["0", "1", "-", "2", "x"], "'x' is no sublayer"),
        (["0", "2", "-", "2", "3"], r"new sublayer 1 \(f\) cannot take the weights of old sublayer 2 \(s\)"),
    ):
        with pytest.raises(UserError, match=message):
            given_alignment(words, old, new)
