"""The step that turns sentences into words, and documents to a store on disk and back."""

import hashlib
import json
from importlib import metadata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.readers.files import Piece
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.stages import Job, WorkPaths, store_words
from lazyformer_fairseq.corpus.steps import Document, TaskNotes
from lazyformer_fairseq.corpus.words import NormaliseWords, StoreWords, WordStore, with_plain_symbols
from lazyformer_fairseq.data.text.normalisation import RESERVED_SYMBOLS, TextNormaliser, TextSettings


def words_of(text: str, settings: TextSettings = TextSettings(), format: str = "text") -> str:  # noqa: B008 (frozen)
    document = Document(text=text, id="a:1", metadata={"format": format})
    assert NormaliseWords(settings).process(document) is None
    return document.text


def test_sentences_become_lines_of_words():
    text = "“Well,” said Mr. Brown.\n\n \nIt’s at <url>, see <FILE> or <email>."
    assert words_of(text) == '" well , " said mr. brown .\nit \'s at <url> , see <file> or <email> .'


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


@pytest.mark.parametrize("text", ["", " \n\u00a0\n"])
def test_a_document_without_words_is_dropped(text):
    step = NormaliseWords(TextSettings())
    step.notes = TaskNotes()
    kept = list(step.run([Document(text=text, id="a:1"), Document(text="Yes.", id="a:2")]))
    assert [document.text for document in kept] == ["yes ."]
    assert step.notes.dropped == {"no word": ["a:1"]}
    assert (step.counts["documents in"], step.counts["dropped: no word"], step.counts["documents out"]) == (2, 1, 1)


WORD = st.text(st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), min_size=1, max_size=4)
TEXT = st.lists(st.lists(WORD, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=5).map("\n".join)


def document(text, number=0, **metadata):
    return Document(text, f"d:{number}", metadata={"fingerprint": (number, 2**64 - 1 - number), **metadata})


def write(folder, documents, rank=0, notes=None):
    step = StoreWords(folder / f"{rank:05d}")
    step.notes = notes or step.notes
    list(step.run(documents))
    return WordStore(step.folder), step


def texts_of(store):
    """Each document again: one sentence a line, its words divided by single spaces."""
    words = iter(store.vocabulary[word] for word in store.words)
    sentences = iter([" ".join(next(words) for _ in range(length)) for length in store.sentence_lengths])
    return ["\n".join(next(sentences) for _ in range(length)) for length in store.document_sentences]


@settings(max_examples=15)
@given(st.lists(st.tuples(TEXT, st.booleans()), max_size=6), st.sampled_from([[], [1, 2**64 - 1]]))
def test_documents_come_back_all_or_selected(tmp_path_factory, texts, bands):
    folder = tmp_path_factory.mktemp("stores")
    documents = [
        document(text, number, **({"bands": bands} if bands else {})) for number, (text, _) in enumerate(texts)
    ]
    store, _ = write(folder, documents, rank=3)
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


def test_a_document_without_text_is_dropped_for_a_reason(tmp_path):
    notes = TaskNotes()
    notes.add_example("a step", "before", "after")
    store, step = write(tmp_path, [document("", 4), document("a", 5)], notes=notes)
    assert texts_of(store) == ["a"]
    assert step.counts["dropped: no sentence"] == 1
    stored = json.loads((tmp_path / "00000" / "notes.json").read_text())
    assert stored == json.loads(json.dumps(vars(step.notes)))
    assert stored["examples"]["a step"] == [["before", "after"]]
    assert stored["dropped"] == {"no sentence": ["d:4"]}


VERSIONS = {"spacy": "3.8", "sacremoses": "0.2", "wikiextractor": "3"}  # others may divide a text otherwise
INPUTS = {
    "raw/mediawiki/enwiki-table-markup.xml.bz2": "mediawiki",
    "raw/gutenberg/carroll-alice.txt": "book",
    "raw/gutenberg/chesterton-ball.txt": "book",
    "raw/wikiextractor_ugolbck/AA/wiki_03": "wikiextractor",
    "raw/wikiextractor_json/AA/wiki_00": "jsonl",
    "lm/wikitext-2/wiki.test.tokens": "wikitext",
}
GOLDEN = {
    "bands.npy": "b277e5065b092e31",
    "document_sentences.npy": "4bb0d11e5659ec90",
    "fingerprints.npy": "1d538f2c3910c670",
    "sentence_lengths.npy": "e604d127bbe22aa9",
    "vocabulary.bin": "27de992fded22125",
    "words.npy": "072fdd033bf1c8b6",
}


def test_words_of_real_text_are_those_written_before_anything_was_made_quicker(real_data, tmp_path):
    for package, version in VERSIONS.items():
        if not metadata.version(package).startswith(f"{version}."):
            pytest.skip(f"made with {package} {version}")
    paths = WorkPaths(tmp_path)
    unit = tuple(Piece(str(real_data / path), form) for path, form in INPUTS.items())
    store_words(Job(paths, CorpusSettings(), 1, [], [unit]), 0)
    files = paths.of("words", 0).glob("*.[nb]*")
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files} == GOLDEN
