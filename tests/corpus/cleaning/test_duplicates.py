from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.cleaning.duplicates import DUPLICATE, KEEP, NEAR_DUPLICATE, find_duplicates

HASH = st.sampled_from([0, 1, 2, 2**32, 2**63, 2**63 + 1, 2**64 - 1])


def naive(documents):
    """[(fingerprint, bands)] -> decisions, with dicts."""
    seen, decisions = set(), []
    for fingerprint, bands in documents:
        keys = {*enumerate(bands)}
        decisions.append(DUPLICATE if fingerprint in seen else NEAR_DUPLICATE if keys & seen else KEEP)
        seen |= {fingerprint, *keys}
    return decisions


@st.composite
def documents_in_units(draw):
    width = draw(st.integers(0, 3))
    documents = draw(st.lists(st.tuples(st.tuples(HASH, HASH, st.just("f")), st.tuples(*[HASH] * width)), max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(documents)), max_size=4)))
    places = [0, *cuts, len(documents)]
    return width, documents, [slice(*ends) for ends in pairwise(places)]


@given(documents_in_units(), st.integers(1, 50))
def test_is_what_dicts_find_however_divided(made, documents_at_once):
    width, documents, units = made
    fingerprints = np.array([d[0][:2] for d in documents], dtype=np.uint64).reshape(-1, 2)
    bands = np.array([d[1] for d in documents], dtype=np.uint64).reshape(len(documents), width)
    found = find_duplicates([fingerprints[u] for u in units], [bands[u] for u in units], documents_at_once)
    assert [len(unit) for unit in found] == [len(documents[u]) for u in units]
    assert np.concatenate(found).tolist() == naive(documents)


def test_one_document_repeated_does_not_outgrow_the_memory_of_a_partition(monkeypatch):
    largest = 0
    concatenate = np.concatenate

    def watched(parts):
        nonlocal largest
        joined = concatenate(parts)
        largest = max(largest, len(joined))
        return joined

    monkeypatch.setattr(np, "concatenate", watched)
    units = [np.full((10, 2), 7, dtype=np.uint64) for _ in range(100)]
    found = find_duplicates(units, documents_at_once=50)
    assert largest <= 100
    assert sum(int((unit == KEEP).sum()) for unit in found) == 1 and found[0][0] == KEEP


def test_reads_memory_mapped_arrays_and_no_unit_at_all(tmp_path):
    np.save(tmp_path / "unit.npy", np.array([[1, 2], [1, 2]], dtype=np.uint64))
    (found,) = find_duplicates([np.load(tmp_path / "unit.npy", mmap_mode="r")])
    assert found.tolist() == [KEEP, DUPLICATE]
    assert find_duplicates([]) == []


def test_the_first_similar_document_stays_though_both_resemble_a_later_one():
    fingerprints = np.array([[0, 1], [0, 2], [0, 3]], dtype=np.uint64)
    bands = np.array([[1, 5], [2, 6], [1, 6]], dtype=np.uint64)
    (found,) = find_duplicates([fingerprints], [bands])
    assert found.tolist() == [KEEP, KEEP, NEAR_DUPLICATE]


@pytest.mark.slow
def test_a_million_documents_as_by_numpy_unique():
    generator = np.random.default_rng(1)
    hashes = generator.integers(0, 2**64, (1_000_000, 2), dtype=np.uint64)[generator.integers(0, 900_000, 1_000_000)]
    found = np.concatenate(find_duplicates(np.array_split(hashes, 7), documents_at_once=100_000))
    _, first = np.unique(hashes, axis=0, return_index=True)
    assert np.flatnonzero(found == KEEP).tolist() == sorted(first.tolist())
