"""What counts as the same text or nearly; which documents are held out: by fingerprint and seed alone."""

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.corpus import duplicates
from lazyformer_fairseq.corpus.duplicates import Fingerprint, bands, draw, find_duplicates, fingerprint, threshold
from lazyformer_fairseq.corpus.steps import Document


def test_case_spacing_and_punctuation_make_no_difference():
    one = "It's late,\nsaid the “Émigré” - twice."
    for other in ('it’s LATE — said the\n"émigré" ... twice!', " It s late said the ÉMIGRÉ\u00a0twice"):
        assert fingerprint(one) == fingerprint(other)
        assert bands(one.replace("'", " ")) == bands(other.replace("’", " "))
    assert fingerprint(one) != fingerprint(one.replace("late", "later"))
    assert fingerprint("10 men") != fingerprint("11 men")
    assert len({fingerprint(text) for text in ("", "?", "!", "— —")}) == 4


def test_values_are_the_same_on_every_machine():
    assert fingerprint("The same text, on another machine.") == (9503809916397271360, 736863472412280904)
    assert bands("The same text, on another machine.")[:2] == [6970235066902514239, 3581358794277364210]


@given(st.text(), st.text())
@example("", " ")
@example("a\u1680b", "a\x85b")
def test_documents_of_any_text_get_integers_of_64_bits(one, other):
    document = Document(text=one, id="file:1")
    assert Fingerprint(near_duplicates=True).process(document) is None
    numbers = [*document.metadata["fingerprint"], *document.metadata["bands"]]
    assert len(numbers) == 2 + duplicates.BANDS and all(0 <= number < 2**64 for number in numbers)
    if one.split() == other.split():
        assert fingerprint(one) == fingerprint(other)
    document = Document(text=one, id="file:1")
    Fingerprint().process(document)  # bands only where asked for
    assert "bands" not in document.metadata and document.metadata["fingerprint"] == fingerprint(one)


def similar_pair(generator: random.Random, similarity: float) -> tuple[str, str]:
    """Texts whose sets of runs of 5 words have about this Jaccard similarity: both open alike, then differ."""
    length = 400
    shared = round(length * 2 * similarity / (1 + similarity))
    first, ending = ([f"w{generator.random()}" for _ in range(length)] for _ in range(2))
    return " ".join(first), " ".join(first[: shared + 4] + ending[shared + 4 :])


@pytest.mark.parametrize(("similarity", "least", "most"), [(0.5, 0, 0.03), (0.7, 0.03, 0.25), (0.95, 0.97, 1)])
def test_similar_texts_share_a_band_as_often_as_computed(similarity, least, most):
    generator = random.Random(1)
    pairs = [similar_pair(generator, similarity) for _ in range(150)]
    share = sum(any(a == b for a, b in zip(bands(x), bands(y), strict=True)) for x, y in pairs) / len(pairs)
    assert least <= share <= most


U64 = st.integers(0, 2**64 - 1)


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
    assert (draw(array, seed) < valid_share).tolist() == expected
    assert [bool(draw(row, seed) < valid_share) for row in array] == expected


@pytest.mark.parametrize("valid_share", [0.005, 0.5])
@pytest.mark.parametrize("columns", [(0, 1), (1, 0)])
def test_share(valid_share, columns):
    counting = np.stack([np.zeros(100_000, np.uint64), np.arange(100_000, dtype=np.uint64)], axis=1)
    found = draw(counting[:, columns], seed=1) < valid_share
    assert abs(found.sum() - 100_000 * valid_share) < 4 * (100_000 * valid_share * (1 - valid_share)) ** 0.5


@given(st.lists(st.lists(st.tuples(U64, U64), max_size=5), max_size=3), st.sampled_from([0.0, 1e-9, 0.3, 1.0]))
def test_one_document_is_held_out_where_the_rule_holds_out_none(units, valid_share):
    draws = [draw(np.array(unit, dtype=np.uint64).reshape(-1, 2), 1) for unit in units]
    every = np.concatenate([np.array([]), *draws])
    held_out = every[every < threshold(draws, valid_share)]
    if (every < valid_share).any() or not valid_share or len(every) < 2:
        assert held_out.tolist() == every[every < valid_share].tolist()
    else:
        assert set(held_out) == {every.min()}


HASH = st.sampled_from([0, 1, 2, 2**32, 2**63, 2**63 + 1, 2**64 - 1])


def naive(documents):
    """[(fingerprint, bands)] -> decisions, with dicts."""
    seen, decisions = set(), []
    for own, of_bands in documents:
        keys = {*enumerate(of_bands)}
        is_near = bool(keys & seen)
        decision = duplicates.DUPLICATE if own in seen else duplicates.NEAR_DUPLICATE if is_near else duplicates.KEEP
        decisions.append(decision)
        seen |= {own, *keys}
    return decisions


DOCUMENTS = st.lists(st.lists(st.tuples(*[HASH] * 5), max_size=15), min_size=1, max_size=5)


@settings(max_examples=40)
@given(DOCUMENTS, st.integers(0, 3), st.integers(1, 50))
def test_is_what_dicts_find_however_divided(units, width, documents_at_once):
    arrays = [np.array(unit, dtype=np.uint64).reshape(-1, 5) for unit in units]
    fingerprints, bands = [unit[:, :2] for unit in arrays], [unit[:, 2 : 2 + width] for unit in arrays]
    found = find_duplicates(fingerprints, bands, documents_at_once)
    assert list(map(len, found)) == list(map(len, units))
    documents = [((*numbers[:2], "f"), numbers[2 : 2 + width]) for unit in units for numbers in unit]
    assert np.concatenate(found).tolist() == naive(documents)
