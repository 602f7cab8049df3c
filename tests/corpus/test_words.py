"""Sentences to words, documents to a store and back; rare words; fairseq's files, as its own tool writes them."""

import filecmp
import logging
import string
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.corpus import vocabulary
from lazyformer_fairseq.corpus.steps import Document
from lazyformer_fairseq.corpus.vocabulary import smallest_kept_count, word_hashes
from lazyformer_fairseq.corpus.words import NormaliseWords, StoreWords, WordStore, with_plain_symbols
from lazyformer_fairseq.data.text.normalisation import RESERVED_SYMBOLS, TextNormaliser, TextSettings
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import MappedItems, join_parts


def words_of(text: str, settings: TextSettings = TextSettings(), format: str = "text") -> str:  # noqa: B008 (frozen)
    document = Document(text=text, id="a:1", metadata={"format": format})
    assert NormaliseWords(settings).process(document) is None
    return document.text


@pytest.mark.parametrize("tokenise", [True, False])
def test_symbols_of_the_model_are_made_plain_but_for_the_unknown_words_of_wikitext(tokenise):
    settings = TextSettings(moses_tokenise=tokenise)
    words = words_of("A <mask> and <MASK>, <unk> <s> <pad> is <url>.", settings)
    assert not {*words.split()} & {*RESERVED_SYMBOLS}
    assert words.startswith("a < mask > and < mask >") and "<url>" in words
    assert words_of("The <unk> of <mask> .", settings, "wikitext") == "the <unk> of < mask > ."


@settings(max_examples=40)
@given(st.lists(st.sampled_from([*RESERVED_SYMBOLS, *"<>/ aS", "mask", "unk", "<url>", "MASK"])).map("".join))
def test_no_symbol_is_left(text):
    normalise = TextNormaliser(TextSettings())
    assert not {*normalise(with_plain_symbols(text)).split(" ")} & {*RESERVED_SYMBOLS}
    assert "".join(with_plain_symbols(text).split()) == "".join(text.split())


def test_a_document_without_words_is_dropped():
    step = NormaliseWords(TextSettings())
    documents = [Document(text, f"a:{number}") for number, text in enumerate(["", " \n\u00a0\n", "Yes."])]
    assert [document.text for document in step.run(documents)] == ["yes ."]
    assert step.notes.dropped == {"no word": ["a:0", "a:1"]} and step.counts["dropped: no word"] == 2


WORD = st.text(st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), min_size=1, max_size=4)
TEXT = st.lists(st.lists(WORD, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=5).map("\n".join)


def document(text, number=0, **metadata):
    known = {"running_words": len(text.split()), "fingerprint": (number, 2**64 - 1 - number)}
    return Document(text, f"d:{number}", metadata={**known, **metadata})


def write(folder, documents, rank=0):
    step = StoreWords(folder / f"{rank:05d}")
    list(step.run(documents))
    return WordStore(step.folder)


def texts_of(store):
    """Each document again: one sentence a line, its words divided by single spaces."""
    words = iter(store.vocabulary[word] for word in store.words)
    sentences = iter([" ".join(next(words) for _ in range(length)) for length in store.sentence_lengths])
    return ["\n".join(next(sentences) for _ in range(length)) for length in store.document_sentences]


@settings(max_examples=15)
@given(st.lists(st.tuples(TEXT, st.booleans()), max_size=6), st.sampled_from([[], [1, 2**64 - 1]]))
def test_documents_come_back_all_or_selected(tmp_path_factory, texts, bands):
    folder = tmp_path_factory.mktemp("stores")
    more = {"bands": bands} if bands else {}
    documents = [document(text, number, **more) for number, (text, _) in enumerate(texts)]
    store = write(folder, [document("", 9), *documents], rank=3)  # the one without text is dropped
    assert texts_of(store) == [text for text, _ in texts]
    assert len(store.document_sentences) == len(texts)
    assert store.vocabulary == sorted({word for text, _ in texts for word in text.split()}, key=str.encode)
    assert store.fingerprints.tolist() == [[number, 2**64 - 1 - number] for number in range(len(texts))]
    assert store.bands.tolist() == [bands for _ in texts]
    arrays = (store.words, store.sentence_lengths, store.document_sentences, store.fingerprints, store.bands)
    assert [array.dtype.name for array in arrays] == ["uint32"] * 3 + ["uint64"] * 2
    assert all(isinstance(array, np.memmap) for array in arrays if array.size)
    assert [file.name for file in folder.iterdir()] == ["00003"]
    selected = store.select(np.array([keep for _, keep in texts], dtype=bool))
    kept = [text.split("\n") for text, keep in texts if keep]
    words = [word for sentences in kept for sentence in sentences for word in sentence.split()]
    assert [store.vocabulary[word] for word in selected.words] == words
    assert selected.sentence_lengths.tolist() == [len(line.split()) for sentences in kept for line in sentences]
    assert selected.document_sentences.tolist() == [len(sentences) for sentences in kept]


COUNTED_TEXT = st.lists(st.sampled_from([*"abcdefgh", "<url>", "straße", "猫"]), min_size=1, max_size=12).map(" ".join)
UNITS = st.lists(st.lists(st.tuples(COUNTED_TEXT, st.booleans()), max_size=4), min_size=1, max_size=4)


def counted(folder, units):
    """The folders of counts of units, each a list of (text, whether it is kept)."""
    for rank, unit in enumerate(units):
        store = write(folder / "words", [document(text, n) for n, (text, _) in enumerate(unit)], rank)
        vocabulary.count_words(store, np.array([keep for _, keep in unit], dtype=bool), folder / "counts" / str(rank))
    return [folder / "counts" / str(rank) for rank in range(len(units))]


@settings(max_examples=15)
@given(UNITS, st.floats(0.1, 1), st.integers(1, 40), st.integers(1, 12))
def test_merging_is_counting_all(tmp_path_factory, units, coverage, entries_at_once, most_frequent):
    folder = tmp_path_factory.mktemp("counts")
    folders = counted(folder, units)
    expected = Counter(word for unit in units for text, keep in unit if keep for word in text.split())
    arguments = coverage, ["<url>"], most_frequent
    vocabulary.ENTRIES_AT_ONCE = entries_at_once
    if not expected:
        with pytest.raises(UserError, match="no word"):
            vocabulary.merge_counts(folders, folder / "kept.npy", *arguments)
        return
    summary, found = vocabulary.merge_counts(folders, folder / "kept.npy", *arguments)
    min_count = smallest_kept_count(np.array(list(expected.values())), coverage)
    kept = {word: count for word, count in expected.items() if count >= min_count or word == "<url>"}
    assert summary == {
        **{"words": len(expected), "kept_words": len(kept), "min_count": min_count},
        "dropped_types_share": 1 - len(kept) / len(expected),
        "dropped_tokens_share": 1 - sum(kept.values()) / expected.total(),
    }
    assert np.load(folder / "kept.npy", mmap_mode="r").tolist() == sorted(word_hashes(list(kept)).tolist())
    frequent = [pair for pair in expected.items() if pair[1] >= min_count]
    frequent = [pair for pair in frequent if sum(c >= pair[1] for c in expected.values()) <= most_frequent]
    assert found == sorted(frequent, key=lambda pair: (-pair[1], pair[0]))
    assert sorted(file.name for file in folder.iterdir()) == ["counts", "kept.npy", "words"]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40).map(np.array), st.floats(0.01, 1))
def test_coverage_takes_the_largest_threshold(counts, coverage):
    def share(min_count):
        return counts[counts >= min_count].sum() / counts.sum()

    threshold = smallest_kept_count(counts, coverage)
    assert threshold in counts
    assert share(threshold) >= coverage > share(threshold + 1)


def test_hashes_are_the_same_everywhere():
    assert word_hashes(["", "the", "猫"]).tolist() == [0x2D06800538D394C2, 0xCB1283631CF33D7D, 0x80C5670999AA4863]


EOS, UNK = 2, 3
TEXTS = [
    "the house of the old king is red , is n't it ?\nsee <url> or write to <email>\n猫 is rare",
    "a rare-word stands here",
    *[f"the house number {n} is old\nhouse {n * n} is red" for n in range(40)],
]
RARE = "rare-word"
ODD_WORD = st.one_of(
    st.sampled_from(["the", "house", "<url>", "<mask>", "<unk>", "x<email>y", RARE]),
    st.text(st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), min_size=1, max_size=5),
)
LINES = st.lists(st.lists(ODD_WORD, min_size=1, max_size=5).map(" ".join), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    counts = Counter(" ".join([*TEXTS, *string.printable.split()]).split())
    counts += Counter(string.punctuation + string.ascii_lowercase)
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    return Tokenizer.train_on_counts(counts.items(), folder, 140, TextSettings(character_coverage=0.998))


def write_splits(folder, texts, tokenizer, kept=None):
    """Writes the ids of ``texts``, every fifth of them in valid; returns the counts."""
    store = write(folder / "words", [document(text, n) for n, text in enumerate(texts)])
    kept = set(store.vocabulary) - {RARE} if kept is None else kept
    valid = np.arange(len(texts)) % 5 == 4
    hashes = np.sort(word_hashes(sorted(kept)))
    return vocabulary.write_ids(store, {"train": ~valid, "valid": valid}, tokenizer, hashes, folder / "0")


def read(prefix):
    return [ids.tolist() for ids in MappedItems(prefix)]


def ids_in_use(sentence, tokenizer):
    """As GLUE and ``fill_mask`` do, but for a literal mask."""
    return tokenizer.encode_normalised(sentence.replace("<mask>", "< mask >"))


def ids_of_sentence(sentence, tokenizer):
    """The plain way."""
    return [index for word in sentence.split(" ") for index in ([UNK] if word == RARE else ids_in_use(word, tokenizer))]


def items_of(texts, tokenizer, ids_of=ids_of_sentence):
    return [item for text in texts for item in [*([*ids_of(line, tokenizer), EOS] for line in text.split("\n")), [EOS]]]


@settings(max_examples=20)
@given(st.lists(LINES, max_size=4))
def test_every_word_is_as_encode_normalised(tokenizer, tmp_path_factory, documents):
    texts = ["\n".join(sentences) for sentences in documents]
    assume(documents and "▁" not in "".join(texts))  # sentencepiece's own sign for a space
    folder = tmp_path_factory.mktemp("ids")
    write_splits(folder, texts, tokenizer)
    found = read(folder / "0.train")
    assert found == items_of([text for n, text in enumerate(texts) if n % 5 != 4], tokenizer)
    assert not any(tokenizer.mask_index in item for item in found)
    for text in texts:
        if RARE not in text and "<mask>" not in text:
            for sentence in text.split("\n"):  # the words of a sentence do not influence each other
                assert ids_of_sentence(sentence, tokenizer) == tokenizer.encode_normalised(sentence)


def test_validation_is_spelt_in_pieces_whatever_training_has_special_tokens_are_never_rare(tokenizer, tmp_path):
    counts = write_splits(tmp_path, [*["the house"] * 4, "houses of the old kings"], tokenizer, kept={"the"})
    assert read(tmp_path / "0.valid") == [[*tokenizer.encode("houses of the old kings"), EOS], [EOS]]
    assert (counts["valid"]["unknown"], counts["train"]["unknown"]) == (0, 4)
    assert write_splits(tmp_path / "none", ["the house"], tokenizer, kept=set())["train"]["unknown"] == 2
    write_splits(tmp_path / "more", ["<url> the ▁"], tokenizer, kept={"▁"})
    assert read(tmp_path / "more" / "0.train") == [[tokenizer.dictionary.index("<url>"), UNK, UNK, EOS], [EOS]]


def test_counts_and_items_are_those_of_the_sentences(tokenizer, tmp_path):
    counts = write_splits(tmp_path, TEXTS, tokenizer)
    assert read(tmp_path / "0.valid") == items_of(TEXTS[4::5], tokenizer, ids_in_use)
    train = [text for n, text in enumerate(TEXTS) if n % 5 != 4]
    assert read(tmp_path / "0.train") == items_of(train, tokenizer)
    assert read(tmp_path / "0.train")[4].count(UNK) == 1  # the document of the rare word
    for split, texts in (("valid", TEXTS[4::5]), ("train", train)):
        items = read(tmp_path / f"0.{split}")
        tokens = Counter(index for item in items for index in item[:-1])
        unigrams = vocabulary.load_unigrams([tmp_path / f"0.{split}"], len(tokenizer.dictionary))
        assert unigrams.dtype == np.int64
        assert unigrams.tolist() == [tokens[index] for index in range(len(tokenizer.dictionary))]
        found = counts[split]
        assert (found["documents"], found["sentences"]) == (len(texts), len(items) - len(texts))
        assert (found["tokens"], found["unknown"]) == (tokens.total(), tokens[UNK])


def test_fairseq_preprocess_writes_the_same(tokenizer, tmp_path, monkeypatch):
    from fairseq import options
    from fairseq_cli import preprocess

    write_splits(tmp_path, TEXTS, tokenizer)
    for split in ("train", "valid"):
        lines = (" ".join(tokenizer.dictionary[index] for index in item[:-1]) for item in read(tmp_path / f"0.{split}"))
        (tmp_path / f"{split}.pieces").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        join_parts([tmp_path / f"0.{split}"], tmp_path / "ours" / split)
    tokenizer.dictionary.save(str(tmp_path / "dict.txt"))
    monkeypatch.setattr(logging.getLogger("fairseq_cli.preprocess"), "handlers", [])  # it would add one to stay
    monkeypatch.chdir(tmp_path)
    command = "--only-source --workers 1 --dataset-impl mmap --destdir theirs --srcdict dict.txt"
    command += " --trainpref train.pieces --validpref valid.pieces"
    preprocess.main(options.get_preprocessing_parser().parse_args(command.split()))
    theirs = tmp_path / "theirs"
    assert filecmp.cmp(theirs / "dict.txt", tmp_path / "dict.txt", shallow=False)
    names = ["train.bin", "train.idx", "valid.bin", "valid.idx"]
    assert filecmp.cmpfiles(tmp_path / "ours", theirs, names, shallow=False)[0] == names
