"""Counting words, merging the counts of units, and the filter of rare words, against Counter.

Stored words to fairseq's files: what is in them, and that fairseq's own tool writes the same.
"""

import filecmp
import logging
import string
from collections import Counter

import numpy as np
import pytest
from fairseq import options
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq_cli import preprocess
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.settings import WORD_COVERAGE
from lazyformer_fairseq.corpus.steps import Document
from lazyformer_fairseq.corpus.vocabulary import (
    LENGTH_EDGES,
    count_words,
    length_histogram,
    load_unigrams,
    merge_counts,
    place_of,
    smallest_kept_count,
    word_hashes,
    write_ids,
)
from lazyformer_fairseq.corpus.words import StoreWords, WordStore
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import join_parts

TEXT = st.lists(st.sampled_from([*"abcdefgh", "<url>", "straße", "猫"]), min_size=1, max_size=12).map(" ".join)
UNITS = st.lists(st.lists(st.tuples(TEXT, st.booleans()), max_size=4), min_size=1, max_size=4)


def counted(folder, units):
    """The folders of counts of units, each a list of (text, whether it is kept)."""
    for rank, unit in enumerate(units):
        documents = [Document(text, str(n), metadata={"fingerprint": (0, n)}) for n, (text, _) in enumerate(unit)]
        words = folder / "words" / str(rank)
        list(StoreWords(words).run(documents))
        keep = np.array([keep for _, keep in unit], dtype=bool)
        count_words(WordStore(words), keep, folder / "counts" / str(rank))
    return [folder / "counts" / str(rank) for rank in range(len(units))]


def counted_words(folder, *counts):
    return counted(folder, [[(" ".join(Counter(unit).elements()), True)] for unit in counts])


@settings(max_examples=15)
@given(UNITS, st.floats(0.1, 1), st.integers(1, 40), st.integers(1, 12))
def test_merging_is_counting_all(tmp_path_factory, units, coverage, entries_at_once, most_frequent):
    folder = tmp_path_factory.mktemp("counts")
    folders = counted(folder, units)
    expected = Counter(word for unit in units for text, keep in unit if keep for word in text.split())
    arguments = coverage, ["<url>"], most_frequent, entries_at_once
    if not expected:
        with pytest.raises(UserError, match="no word"):
            merge_counts(folders, folder / "kept.npy", *arguments)
        return
    summary, found = merge_counts(folders, folder / "kept.npy", *arguments)
    min_count = smallest_kept_count(Counter(expected.values()), coverage)
    kept = {word: count for word, count in expected.items() if count >= min_count or word == "<url>"}
    assert summary == {
        "words": len(expected),
        "kept_words": len(kept),
        "min_count": min_count,
        "dropped_types_share": 1 - len(kept) / len(expected),
        "dropped_tokens_share": 1 - sum(kept.values()) / expected.total(),
    }
    assert np.load(folder / "kept.npy", mmap_mode="r").tolist() == sorted(word_hashes(list(kept)).tolist())
    frequent = [pair for pair in expected.items() if pair[1] >= min_count]
    frequent = [pair for pair in frequent if sum(c >= pair[1] for c in expected.values()) <= most_frequent]
    assert found == sorted(frequent, key=lambda pair: (-pair[1], pair[0]))
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
    summary, _ = merge_counts(folders, tmp_path / "kept.npy", WORD_COVERAGE)
    assert summary == {
        "words": 13,
        "kept_words": 11,
        "min_count": 4,
        "dropped_types_share": pytest.approx(2 / 13),
        "dropped_tokens_share": pytest.approx(2 / 5006),
    }


def test_hashes_are_the_same_everywhere():
    assert word_hashes(["", "the", "猫"]).tolist() == [0x2D06800538D394C2, 0xCB1283631CF33D7D, 0x80C5670999AA4863]


@given(st.lists(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_place_of(hashes, table):
    table = sorted(table)
    places = place_of(np.array(hashes, dtype=np.uint64), np.array(table, dtype=np.uint64))
    assert places.tolist() == [table.index(value) if value in table else -1 for value in hashes]


EOS, UNK = 2, 3
TEXTS = [
    "the house of the old king is red , is n't it ?\nsee <url> or write to <email>\n猫 is rare",
    "a rare-word stands here",
    *[f"the house number {n} is old\nhouse {n * n} is red" for n in range(40)],
]
RARE = "rare-word"
WORD = st.one_of(
    st.sampled_from(["the", "house", "<url>", "<mask>", "<unk>", "x<email>y", RARE]),
    st.text(st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), min_size=1, max_size=5),
)
DOCUMENTS = st.lists(st.lists(st.lists(WORD, min_size=1, max_size=5).map(" ".join), min_size=1, max_size=3), max_size=4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    counts = Counter(" ".join([*TEXTS, *string.printable.split()]).split())
    counts += Counter(string.punctuation + string.ascii_lowercase)
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    return Tokenizer.train_on_counts(counts.items(), folder, 140, TextSettings(character_coverage=0.998))


def stored(folder, texts):
    documents = [Document(text, str(n), metadata={"fingerprint": (0, n)}) for n, text in enumerate(texts)]
    list(StoreWords(folder).run(documents))
    return WordStore(folder)


def write(folder, texts, tokenizer, kept=None):
    """Writes the ids of ``texts``, every fifth of them in valid; returns the counts."""
    store = stored(folder / "words", texts)
    kept = set(store.vocabulary) - {RARE} if kept is None else kept
    valid = np.arange(len(texts)) % 5 == 4
    hashes = np.sort(word_hashes(sorted(kept)))
    prefixes = {split: folder / f"0.{split}" for split in ("train", "valid")}
    return write_ids(store, {"train": ~valid, "valid": valid}, tokenizer, hashes, prefixes)


def read(prefix):
    dataset = MMapIndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


def ids_of_sentence(sentence, tokenizer):
    """The plain way."""
    ids = []
    for word in sentence.split(" "):
        word_ids = tokenizer.encode_normalised(word.replace("<mask>", "< mask >"))
        ids += [UNK] if word == RARE else word_ids
    return ids


def ids_in_use(sentence, tokenizer):
    """As GLUE and ``fill_mask`` do, but for a literal mask."""
    return tokenizer.encode_normalised(sentence.replace("<mask>", "< mask >"))


def items_of(texts, tokenizer, ids_of_sentence=ids_of_sentence):
    return [
        item
        for text in texts
        for item in [*([*ids_of_sentence(sentence, tokenizer), EOS] for sentence in text.split("\n")), [EOS]]
    ]


def test_items_are_encoded_sentences_and_boundaries(tokenizer, tmp_path):
    write(tmp_path, TEXTS, tokenizer)
    assert read(tmp_path / "0.valid") == items_of(TEXTS[4::5], tokenizer, ids_in_use)
    assert read(tmp_path / "0.train") == items_of([t for n, t in enumerate(TEXTS) if n % 5 != 4], tokenizer)
    assert tokenizer.dictionary.index("<url>") in read(tmp_path / "0.train")[1]
    assert read(tmp_path / "0.train")[4].count(UNK) == 1  # the document of the rare word


@settings(max_examples=20)
@given(DOCUMENTS)
def test_every_word_is_as_encode_normalised(tokenizer, tmp_path_factory, documents):
    texts = ["\n".join(sentences) for sentences in documents]
    assume(documents and "▁" not in "".join(texts))  # sentencepiece's own sign for a space
    folder = tmp_path_factory.mktemp("ids")
    write(folder, texts, tokenizer)
    expected = items_of([text for n, text in enumerate(texts) if n % 5 != 4], tokenizer)
    assert read(folder / "0.train") == expected
    assert not any(tokenizer.mask_index in item for item in expected)
    for text in texts:
        if RARE not in text and "<mask>" not in text:
            for sentence in text.split("\n"):  # the words of a sentence do not influence each other
                assert ids_of_sentence(sentence, tokenizer) == tokenizer.encode_normalised(sentence)


def test_pieces_spell_the_validation_splits_words_whether_training_has_them_or_not(tokenizer, tmp_path):
    counts = write(tmp_path, [*["the house"] * 4, "houses of the old kings"], tokenizer, kept={"the"})
    assert read(tmp_path / "0.valid") == [[*tokenizer.encode("houses of the old kings"), EOS], [EOS]]
    assert (counts["valid"]["unknown"], counts["train"]["unknown"]) == (0, 4)


def test_special_tokens_are_never_rare_and_no_word_vanishes(tokenizer, tmp_path):
    write(tmp_path, ["<url> the ▁"], tokenizer, kept={"▁"})
    assert read(tmp_path / "0.train") == [[tokenizer.dictionary.index("<url>"), UNK, UNK, EOS], [EOS]]


def test_counts(tokenizer, tmp_path):
    counts = write(tmp_path, TEXTS, tokenizer)
    for split, texts in (("valid", TEXTS[4::5]), ("train", [t for n, t in enumerate(TEXTS) if n % 5 != 4])):
        items = read(tmp_path / f"0.{split}")
        tokens = Counter(index for item in items for index in item[:-1])
        unigrams = load_unigrams([tmp_path / f"0.{split}"], len(tokenizer.dictionary))
        assert unigrams.dtype == np.int64
        assert unigrams.tolist() == [tokens[index] for index in range(len(tokenizer.dictionary))]
        found = counts[split]
        assert found["documents"] == len(texts)
        assert found["sentences"] == len(items) - len(texts)
        assert (found["tokens"], found["unknown"]) == (tokens.total(), tokens[UNK])
        lengths = {
            "words per sentence": [len(line.split()) for text in texts for line in text.split("\n")],
            "words per document": [len(text.split()) for text in texts],
            "sentences per document": [len(text.split("\n")) for text in texts],
        }
        assert found["lengths"] == {name: length_histogram(np.array(of)) for name, of in lengths.items()}


@given(st.lists(st.integers(1, 2**27)))
def test_histogram_counts_every_length(lengths):
    counts = length_histogram(np.array(lengths, dtype=np.int64))
    assert sum(counts) == len(lengths)
    for low, high, count in zip(LENGTH_EDGES[:-2], LENGTH_EDGES[1:-1], counts, strict=False):
        assert count == sum(low <= length < high for length in lengths)


def test_a_split_without_documents_can_be_joined(tokenizer, tmp_path):
    counts = write(tmp_path, TEXTS[:2], tokenizer)
    assert counts["valid"]["documents"] == counts["valid"]["tokens"] == 0
    join_parts([tmp_path / "0.valid", tmp_path / "0.train", tmp_path / "0.valid"], tmp_path / "joined")
    assert filecmp.cmp(tmp_path / "joined.bin", tmp_path / "0.train.bin", shallow=False)
    assert filecmp.cmp(tmp_path / "joined.idx", tmp_path / "0.train.idx", shallow=False)


def fairseq_preprocess(folder, pieces, *arguments):
    """Runs fairseq's own tool on files of pieces; returns the folder that it wrote."""
    command = ["--only-source", "--workers", "1", "--dataset-impl", "mmap", "--destdir", str(folder), *arguments]
    for split in ("train", "valid"):
        command += [f"--{split}pref", str(pieces / f"{split}.pieces")]
    handlers = list(logging.getLogger("fairseq_cli.preprocess").handlers)
    preprocess.main(options.get_preprocessing_parser().parse_args(command))
    logging.getLogger("fairseq_cli.preprocess").handlers[:] = handlers
    return folder


def test_fairseq_preprocess_writes_the_same(tokenizer, tmp_path):
    write(tmp_path, TEXTS, tokenizer)
    for split in ("train", "valid"):
        lines = (" ".join(tokenizer.dictionary[index] for index in item[:-1]) for item in read(tmp_path / f"0.{split}"))
        (tmp_path / f"{split}.pieces").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        join_parts([tmp_path / f"0.{split}"], tmp_path / "ours" / split)
    dictionary = tmp_path / "dict.txt"
    tokenizer.dictionary.save(str(dictionary))
    theirs = fairseq_preprocess(tmp_path / "theirs", tmp_path, "--srcdict", str(dictionary))
    assert filecmp.cmp(theirs / "dict.txt", dictionary, shallow=False)
    names = ["train.bin", "train.idx", "valid.bin", "valid.idx"]
    assert filecmp.cmpfiles(tmp_path / "ours", theirs, names, shallow=False)[0] == names
