"""Which documents are held out depends on nothing but the fingerprint and the seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.cleaning.held_out import draw, is_held_out, threshold

U64 = st.integers(0, 2**64 - 1)
COUNTING = np.stack([np.zeros(100_000, np.uint64), np.arange(100_000, dtype=np.uint64)], axis=1)


def plain(high, low, valid_share, seed):
    """The same in Python's own integers."""

    def mix(value):
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    return (mix(mix(mix(seed % 2**64) ^ high) ^ low) >> 11) / 2**53 < valid_share


@given(st.lists(st.tuples(U64, U64)), st.floats(0, 1), st.integers())
def test_is_as_in_plain_integers(fingerprints, valid_share, seed):
    array = np.array(fingerprints, dtype=np.uint64).reshape(-1, 2)
    expected = [plain(*pair, valid_share, seed) for pair in fingerprints]
    assert is_held_out(array, valid_share, seed).tolist() == expected
    assert [bool(is_held_out(row, valid_share, seed)) for row in array] == expected


@pytest.mark.parametrize("valid_share", [0.005, 0.5])
@pytest.mark.parametrize("columns", [(0, 1), (1, 0)])
def test_share(valid_share, columns):
    found = is_held_out(COUNTING[:, columns], valid_share, seed=1)
    assert abs(found.sum() - 100_000 * valid_share) < 4 * (100_000 * valid_share * (1 - valid_share)) ** 0.5


def test_limits_and_seeds():
    assert not is_held_out(COUNTING, 0, 1).any()
    assert is_held_out(COUNTING, 1, 1).all()
    both = is_held_out(COUNTING, 0.5, 1) & is_held_out(COUNTING, 0.5, 2)
    assert abs(both.mean() - 0.25) < 0.01


@given(st.lists(st.lists(st.tuples(U64, U64), max_size=5), max_size=3), st.sampled_from([0.0, 1e-9, 0.3, 1.0]))
def test_one_document_is_held_out_where_the_rule_holds_out_none(units, valid_share):
    draws = [draw(np.array(unit, dtype=np.uint64).reshape(-1, 2), 1) for unit in units]
    every = np.concatenate([np.array([]), *draws])
    held_out = every[every < threshold(draws, valid_share)]
    if (every < valid_share).any() or not valid_share or len(every) < 2:
        assert held_out.tolist() == every[every < valid_share].tolist()
    else:
        assert set(held_out) == {every.min()}
