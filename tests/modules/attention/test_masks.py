import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns, count_pairs, count_share, mask_of
from lazyformer_fairseq.modules.attention.scores import Scores

_reach = st.none() | st.integers(0, 5)
_bands = st.tuples(_reach, _reach, st.integers(1, 4), st.integers(0, 5)).map(lambda fields: Band(*fields))
_columns = st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 5)).map(
    lambda fields: Columns(*fields[:2], min(fields[1:]))
)
_parts = st.lists(_bands | _columns, min_size=1, max_size=3).map(tuple)
masks = st.lists(st.tuples(st.integers(1, 3), _parts), min_size=1, max_size=3).map(
    lambda groups: AttentionMask(tuple(groups))
)


def is_seen(part: Band | Columns, query: int, key: int) -> bool:
    """By the words of the docstrings, for one pair."""
    if isinstance(part, Columns):
        is_last = part.period > 0 and key % part.period + part.last >= part.period
        return key < part.first or is_last
    steps, rest = divmod(abs(key - query), part.dilation)
    limit = part.before if key < query else part.after
    same_block = not part.block or key // part.block == query // part.block
    return rest == 0 and (limit is None or steps <= limit) and same_block


@given(masks, st.integers(1, 8), st.integers(0, 4))
def test_a_mask_is_the_union_of_its_parts_pair_by_pair(mask, time, memory):
    keys = memory + time
    shown = mask.dense(time, keys, torch.device("cpu"))
    heads = [parts for number, parts in mask.groups for _ in range(number)]
    expected = [
        [[any(is_seen(part, memory + i, j) for part in parts) for j in range(keys)] for i in range(time)]
        for parts in heads
    ]
    assert torch.equal(shown.expand(len(heads), -1, -1), torch.tensor(expected))


@given(masks, st.integers(1, 40), st.integers(0, 4), st.booleans())
def test_the_share_of_pairs_is_counted(mask, time, memory, is_causal):
    keys = memory + time
    pairs = sum(number for number, _ in mask.groups) * time * keys
    expected = max(1, count_pairs(mask, time, keys, is_causal)) / pairs
    assert count_share(mask, time, keys, is_causal) == float(f"{expected:.3g}")


@pytest.mark.parametrize("part", [Band(64, 0), Band(None, 0, block=64), Band(None, 0, 64), Columns(1, 64, 8)])
def test_the_share_of_long_texts_is_estimated(part):
    mask = AttentionMask(((3, (part,)), (1, (Band(9, 9),))))
    for time, keys in ((1000, 1000), (4096, 4096), (2048, 4096)):
        pairs = count_pairs(mask, time, keys, True)
        assert count_share(mask, time, keys, True) == pytest.approx(pairs / (4 * time * keys), rel=0.03)


@given(masks)
def test_it_travels_as_numbers(mask):
    assert mask_of(mask.flat()) == mask
    assert Scores(mask=mask, extra=2).flat().scores().mask == mask


def test_no_numbers_are_no_mask():
    assert mask_of([]) is None


def test_what_scores_add_hides_what_is_masked_out_and_shows_what_all_see():
    mask = AttentionMask(((2, (Band(1, 0),)),))
    seen = torch.tensor([[False, True, False, False]])
    added = Scores(mask=mask, seen_BK=seen, extra=1).dense(4, 5, torch.zeros(()))
    rows = [[1, 1, 0, 0, 1], [1, 1, 0, 0, 1], [0, 1, 1, 0, 1], [0, 1, 1, 1, 1]]  # the last key is no token
    assert torch.equal(added.isneginf().logical_not().squeeze((0, 1)), torch.tensor(rows, dtype=torch.bool))


def test_sublayers_of_one_pass_write_what_they_share_once_for_each_mask():
    shared = Scores(is_causal=True)
    like, near, far = torch.zeros(()), *(AttentionMask(((1, (Band(reach, 0),)),)) for reach in (1, 2))
    first, again, other = (shared.with_own(mask=mask).dense(4, 4, like) for mask in (near, near, far))
    assert first is again and not torch.equal(first, other)
    assert shared.dense(4, 4, like) is shared.dense(4, 4, like)
