"""The words of some real text are, byte for byte, those that were written before anything was made quicker."""

import hashlib
from importlib import metadata

import pytest

from lazyformer_fairseq.corpus.readers.files import Piece
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.stages import Job, WorkPaths, store_words

VERSIONS = {"spacy": "3.8", "sacremoses": "0.2", "wikiextractor": "3"}  # others may divide a text otherwise
INPUTS = (
    ("raw/mediawiki/enwiki-table-markup.xml.bz2", "mediawiki"),
    ("raw/gutenberg/carroll-alice.txt", "book"),
    ("raw/gutenberg/chesterton-ball.txt", "book"),
    ("raw/wikiextractor_ugolbck/AA/wiki_03", "wikiextractor"),
    ("raw/wikiextractor_json/AA/wiki_00", "jsonl"),
    ("lm/wikitext-2/wiki.test.tokens", "wikitext"),
)
GOLDEN = {
    "bands.npy": "b277e5065b092e31",
    "document_sentences.npy": "4bb0d11e5659ec90",
    "fingerprints.npy": "1d538f2c3910c670",
    "sentence_lengths.npy": "e604d127bbe22aa9",
    "vocabulary.bin": "27de992fded22125",
    "words.npy": "072fdd033bf1c8b6",
}


def test_words_of_real_text(real_data, tmp_path):
    for package, version in VERSIONS.items():
        if not metadata.version(package).startswith(f"{version}."):
            pytest.skip(f"made with {package} {version}")
    paths = WorkPaths(tmp_path)
    unit = tuple(Piece(str(real_data / path), form) for path, form in INPUTS)
    store_words(Job(paths, CorpusSettings(), 1, [], [unit]), 0)
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths.of("words", 0).glob("*.[nb]*")
    }
    assert found == GOLDEN
