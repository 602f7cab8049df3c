import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.data.datasets.masking import Masking
from lazyformer_fairseq.errors import UserError

SPECIAL = (0, 1, 2, 3, 99)
MASK, PAD = 99, 1
MASKING = Masking(vocab_size=100, mask_index=MASK, pad_index=PAD, special=SPECIAL)

blocks = st.lists(st.integers(4, 98), max_size=40).map(lambda words: np.array([0, *words, 2, 2, 3, 2]))


@given(blocks, st.integers(0, 3), st.integers(1, 3), st.integers(0, 10_000))
def test_masks_are_a_function_of_seed_epoch_and_index(tokens, seed, epoch, index):
    np.random.seed(seed + epoch)  # the global state must not matter
    first = MASKING.apply(tokens, seed, epoch, index)
    np.random.seed(7)
    second = MASKING.apply(tokens, seed, epoch, index)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


@given(blocks, st.integers(1, 1000))
def test_targets_are_the_words_to_predict_and_all_else_stays(tokens, index):
    masked, targets = MASKING.apply(tokens, 1, 1, index)
    to_predict = targets != PAD
    assert np.array_equal(targets[to_predict], tokens[to_predict])
    assert np.array_equal(masked[~to_predict], tokens[~to_predict])
    assert not np.isin(tokens[to_predict], SPECIAL).any()
    words = (~np.isin(tokens, SPECIAL)).sum()
    assert abs(to_predict.sum() - 0.15 * words) < 1 or (to_predict.sum() == 1 and 0 < words < 7)


def test_each_of_seed_epoch_and_index_changes_the_masks():
    tokens = np.arange(4, 99)
    base = MASKING.apply(tokens, 1, 1, 1)[0]
    for other in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        assert not np.array_equal(base, MASKING.apply(tokens, *other)[0])


def test_shares_are_15_percent_and_80_10_10():
    tokens = np.random.default_rng(1).integers(4, 99, 200_000)
    masked, targets = MASKING.apply(tokens, 1, 1, 0)
    chosen = targets != PAD
    assert chosen.mean() == pytest.approx(0.15, abs=1e-4)
    became_mask = masked[chosen] == MASK
    stayed = masked[chosen] == tokens[chosen]
    assert became_mask.mean() == pytest.approx(0.8, abs=0.01)
    # A random word is the word itself once in 95.
    assert stayed.mean() == pytest.approx(0.1 + 0.1 / 95, abs=0.01)
    replacements = masked[chosen][~became_mask & ~stayed]
    assert set(replacements) == set(range(4, 99))


def test_short_blocks_still_have_the_expected_share():
    tokens = np.arange(4, 14)
    counts = [(MASKING.apply(tokens, 1, 1, index)[1] != PAD).sum() for index in range(4000)]
    assert set(counts) == {1, 2} and np.mean(counts) == pytest.approx(1.5, abs=0.05)


@pytest.mark.parametrize(
    "shares", [{"probability": 0}, {"probability": 1.5}, {"keep": 0.6, "random": 0.6}, {"keep": -1}]
)
def test_impossible_shares_are_refused(shares):
    with pytest.raises(UserError, match="mask_prob"):
        Masking(vocab_size=100, mask_index=MASK, pad_index=PAD, special=SPECIAL, **shares)
