import pickle
import random

import pytest
from datatrove.data import Document
from hypothesis import example, given
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.cleaning.fingerprint import BANDS, Fingerprint, bands, fingerprint


def test_case_spacing_and_punctuation_make_no_difference():
    one = "It's late,\nsaid the “Émigré” - twice."
    for other in ('it’s LATE — said the\n"émigré" ... twice!', " It s late said the ÉMIGRÉ\u00a0twice"):
        assert fingerprint(one) == fingerprint(other)
        assert bands(one.replace("'", " ")) == bands(other.replace("’", " "))
    assert fingerprint(one) != fingerprint(one.replace("late", "later"))
    assert fingerprint("10 men") != fingerprint("11 men")


def test_texts_without_letters_differ():
    assert len({fingerprint(text) for text in ("", "?", "!", "— —")}) == 4


def test_values_are_the_same_on_every_machine():
    assert fingerprint("The same text, on another machine.") == (9503809916397271360, 736863472412280904)
    assert bands("The same text, on another machine.")[:2] == [6970235066902514239, 3581358794277364210]


@given(st.text(), st.text())
@example("", " ")
@example("a\u1680b", "a\x85b")
def test_documents_of_any_text_get_integers_of_64_bits(one, other):
    document = Document(text=one, id="file:1")
    step = pickle.loads(pickle.dumps(Fingerprint(near_duplicates=True)))
    assert step.process(document) is None
    numbers = [*document.metadata["fingerprint"], *document.metadata["bands"]]
    assert len(numbers) == 2 + BANDS and all(0 <= number < 2**64 for number in numbers)
    if one.split() == other.split():
        assert fingerprint(one) == fingerprint(other)


def test_bands_only_where_asked_for():
    document = Document(text="Some words.", id="file:1")
    Fingerprint().process(document)
    assert "bands" not in document.metadata and document.metadata["fingerprint"] == fingerprint("Some words.")


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
