"""Count models: interpolated probabilities against Witten and Bell's rule written out."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.data.count_model import NEIGHBOURS, CountModel, ngram

SYMBOLS = 5
TEXTS = st.lists(st.integers(0, SYMBOLS), max_size=60)  # 5 stands for no token
ROWS = st.lists(st.integers(0, SYMBOLS - 1), min_size=1, max_size=8)


def by_definition(levels, text, row, place, token):
    """P(token at a place of a row), by counting with dictionaries."""
    widest = max((abs(offset) for level in levels for offsets in level for offset in offsets), default=0)
    padded = [SYMBOLS] * widest + list(row) + [SYMBOLS] * widest
    probability = 1 / SYMBOLS
    for level in reversed(levels):
        of_level = []
        for offsets in level:
            counts = Counter()
            context = tuple(padded[place + widest + offset] for offset in offsets)
            for here, word in enumerate(text):
                there = [here + offset for offset in offsets]
                is_inside = all(0 <= at < len(text) for at in there)
                if word < SYMBOLS and is_inside and tuple(text[at] for at in there) == context:
                    counts[word] += 1
            types, total = len(counts), sum(counts.values())
            if total:
                of_level.append((counts[token] + types * probability) / (total + types))
            else:
                of_level.append(probability)
        probability = sum(of_level) / len(of_level)
    return probability


@pytest.mark.parametrize("levels", [NEIGHBOURS, ngram(1), ngram(3)], ids=["neighbours", "unigram", "trigram"])
@given(text=TEXTS, row=ROWS)
def test_probabilities_are_those_of_the_rule(levels, text, row):
    """Each place of a row has the probability that counting with dictionaries gives."""
    model = CountModel(levels, SYMBOLS, np.array(text, dtype=np.int64))
    ids = np.array([row])
    found = model.log_probabilities(ids, np.ones_like(ids, dtype=bool), ids.flatten())
    expected = [by_definition(levels, text, row, place, token) for place, token in enumerate(row)]
    np.testing.assert_allclose(np.exp(found), expected, rtol=1e-12)


@given(text=TEXTS, row=ROWS)
def test_probabilities_sum_to_one(text, row):
    """Over all tokens at a place, whatever stands around it."""
    model = CountModel(NEIGHBOURS, SYMBOLS, np.array(text, dtype=np.int64))
    rows = np.repeat([row], SYMBOLS, axis=0)
    at = np.zeros_like(rows, dtype=bool)
    at[:, len(row) // 2] = True
    assert np.exp(model.log_probabilities(rows, at, np.arange(SYMBOLS))).sum() == pytest.approx(1)


def test_the_masked_token_itself_is_not_looked_at():
    """A yardstick of masked LMs must not see the answer, and a neighbour that is masked too is unknown."""
    text = np.array([0, 1, 2] * 50)
    model = CountModel(NEIGHBOURS, SYMBOLS, text)
    at = np.array([[False, True, False]])
    seen = model.log_probabilities(np.array([[0, 1, 2]]), at, np.array([1]))
    hidden = model.log_probabilities(np.array([[0, 4, 2]]), at, np.array([1]))
    alone = model.log_probabilities(np.array([[4, 4, 4]]), at, np.array([1]))
    assert seen == hidden
    assert np.exp(hidden) > 0.98
    assert np.exp(alone) == pytest.approx((50 + 3 / SYMBOLS) / 153)
