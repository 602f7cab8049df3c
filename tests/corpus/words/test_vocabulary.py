"""Counting words, merging the counts of units, and the filter of rare words, against Counter."""

from collections import Counter

import numpy as np
import pytest
from datatrove.data import Document
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.settings import WORD_COVERAGE
from lazyformer_fairseq.corpus.words.vocabulary import (
    count_words,
    merge_counts,
    place_of,
    smallest_kept_count,
    word_hashes,
)
from lazyformer_fairseq.corpus.words.word_store import StoreWords, WordStore
from lazyformer_fairseq.errors import UserError

TEXT = st.lists(st.sampled_from([*"abcdefgh", "<url>", "straße", "猫"]), min_size=1, max_size=12).map(" ".join)
UNITS = st.lists(st.lists(st.tuples(TEXT, st.booleans()), max_size=4), min_size=1, max_size=4)


def counted(folder, units):
    """The folders of counts of units, each a list of (text, whether it is kept)."""
    for rank, unit in enumerate(units):
        documents = [Document(text, str(n), metadata={"fingerprint": (0, n)}) for n, (text, _) in enumerate(unit)]
        list(StoreWords(folder / "words").run(iter(documents), rank))
        keep = np.array([keep for _, keep in unit], dtype=bool)
        count_words(WordStore(folder / "words" / f"{rank:05d}"), keep, folder / "counts" / str(rank))
    return [folder / "counts" / str(rank) for rank in range(len(units))]


def counted_words(folder, *counts):
    return counted(folder, [[(" ".join(Counter(unit).elements()), True)] for unit in counts])


@settings(max_examples=40)
@given(UNITS, st.integers(1, 5), st.integers(1, 40), st.integers(1, 12))
def test_merging_is_counting_all(tmp_path_factory, units, min_count, entries_at_once, most_frequent):
    folder = tmp_path_factory.mktemp("counts")
    folders = counted(folder, units)
    expected = Counter(word for unit in units for text, keep in unit if keep for word in text.split())
    arguments = 0.5, min_count, ["<url>"], most_frequent, entries_at_once
    if not expected:
        with pytest.raises(UserError, match="no word"):
            merge_counts(folders, folder / "kept.npy", *arguments)
        return
    merged = merge_counts(folders, folder / "kept.npy", *arguments)
    kept = {word: count for word, count in expected.items() if count >= min_count or word == "<url>"}
    assert merged.summary == {
        "words": len(expected),
        "kept_words": len(kept),
        "min_count": min_count,
        "dropped_types_share": 1 - len(kept) / len(expected),
        "dropped_tokens_share": 1 - sum(kept.values()) / expected.total(),
    }
    assert np.load(folder / "kept.npy", mmap_mode="r").tolist() == sorted(word_hashes(list(kept)).tolist())
    frequent = [pair for pair in expected.items() if pair[1] >= min_count]
    frequent = [pair for pair in frequent if sum(c >= pair[1] for c in expected.values()) <= most_frequent]
    assert merged.frequent == sorted(frequent, key=lambda pair: (-pair[1], pair[0]))
    assert sorted(file.name for file in folder.iterdir()) == ["counts", "kept.npy", "words"]


@given(st.dictionaries(st.integers(1, 30), st.integers(1, 9), min_size=1), st.floats(0.01, 1))
def test_coverage_takes_the_largest_threshold(types_with_count, coverage):
    def share(min_count):
        kept = sum(count * types for count, types in types_with_count.items() if count >= min_count)
        return kept / sum(count * types for count, types in types_with_count.items())

    threshold = smallest_kept_count(types_with_count, coverage)
    assert threshold in types_with_count
    assert share(threshold) >= coverage > share(threshold + 1)


def test_default_coverage_keeps_equally_frequent_words_together(tmp_path):
    often = {f"word{n}": 500 for n in range(10)}  # 5000 running words, of which 0.1% may go
    folders = counted_words(tmp_path, {**often, "once": 1, "also": 1, "rarely": 3}, {"rarely": 1})
    merged = merge_counts(folders, tmp_path / "kept.npy", WORD_COVERAGE)
    assert merged.summary == {
        "words": 13,
        "kept_words": 11,
        "min_count": 4,
        "dropped_types_share": pytest.approx(2 / 13),
        "dropped_tokens_share": pytest.approx(2 / 5006),
    }


def test_small_text_loses_nothing(tmp_path):
    merged = merge_counts(counted_words(tmp_path, {"a": 3, "b": 1}), tmp_path / "kept.npy", WORD_COVERAGE)
    assert (merged.summary["min_count"], merged.summary["kept_words"]) == (1, 2)
    assert merged.frequent == [("a", 3), ("b", 1)]


def test_order_of_units_does_not_matter(tmp_path):
    folders = counted_words(tmp_path, {"a": 3, "b": 1}, {"b": 2, "c": 1}, {"d": 9})
    results = [merge_counts(order, tmp_path / "kept.npy", 1, 2) for order in (folders, folders[::-1])]
    assert results[0] == results[1]


def test_hashes_are_the_same_everywhere():
    assert word_hashes(["", "the", "猫"]).tolist() == [0x2D06800538D394C2, 0xCB1283631CF33D7D, 0x80C5670999AA4863]


@given(st.lists(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_place_of(hashes, table):
    table = sorted(table)
    places = place_of(np.array(hashes, dtype=np.uint64), np.array(table, dtype=np.uint64))
    assert places.tolist() == [table.index(value) if value in table else -1 for value in hashes]
