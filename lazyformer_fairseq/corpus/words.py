"""Cased sentences -> the words that BPE sees -> the words of one unit of input on disk, which the later stages read.

    STORE/words.npy               uint32 (words,): rows of the unit's vocabulary, in the order of the text
    STORE/sentence_lengths.npy    uint32 (sentences,): words of each sentence
    STORE/document_sentences.npy  uint32 (documents,): sentences of each document
    STORE/running_words.npy       uint32 (documents,): words of each document between spaces, before normalisation
    STORE/fingerprints.npy        uint64 (documents, 2): xxh3_128 of each document, high and low half
    STORE/bands.npy               uint64 (documents, bands): for near-duplicates; no columns without them
    STORE/vocabulary.bin          the unit's distinct words in UTF-8, sorted by their bytes, a line feed between them
    STORE/notes.json              the task's notes for the report, see ``steps.py``

Some 0.8 bytes for each byte of text. Counting or looking up words happens once for each distinct word of a unit.
"""

import json
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import count
from pathlib import Path
from typing import NamedTuple, Optional, Union

import numpy as np

from lazyformer_fairseq.corpus.steps import Document, DocumentStep
from lazyformer_fairseq.data.text.library_recipe import LibraryNormaliser, LibrarySettings
from lazyformer_fairseq.data.text.normalisation import RESERVED_SYMBOLS, UNKNOWN, TextNormaliser, TextSettings
from lazyformer_fairseq.storage.atomic import atomic_folder

WIKITEXT = "wikitext"
VOCABULARY_FILE = "vocabulary.bin"
NOTES_FILE = "notes.json"
_SYMBOLS = re.compile(
    f"<({'|'.join(symbol[1:-1] for symbol in RESERVED_SYMBOLS)})>",
    re.IGNORECASE | re.ASCII,
)


@dataclass
class NormaliseWords(DocumentStep):
    """Each line (a cased sentence) becomes its normalised words, divided by single spaces; lines without any go.

    A literal ``<mask>``, ``</s>`` or other symbol of the model, in a text that mentions it, is written plain, like
    ``< mask >``: only the task may mask. Stand-ins of cleaning such as ``<url>`` stay, and so does the ``<unk>`` by
    which WikiText has replaced its rare words. A tokenizer that came with another model writes symbols plain by itself.

    Dropped: documents with ``no word`` left.
    """

    name = "words"
    settings: Union[TextSettings, LibrarySettings]

    def process(self, document: Document) -> Optional[str]:
        """Process a document; see the class."""
        text = document.text
        document.metadata["running_words"] = len(text.split())
        normalise = load_normaliser(self.settings)
        if "<" in text:
            keep_unknown = document.metadata["format"] == WIKITEXT
            if isinstance(normalise, LibraryNormaliser):
                normalise = partial(normalise, keep_unknown=keep_unknown)
            else:
                text = with_plain_symbols(text, keep_unknown)
        document.text = "\n".join(filter(None, map(normalise, text.split("\n"))))
        if document.text:
            return None
        return "no word"


@lru_cache(maxsize=1)  # once per process, for any number of units
def load_normaliser(
    settings: Union[TextSettings, LibrarySettings],
) -> Union[TextNormaliser, LibraryNormaliser]:
    """Return what makes a tokenizer's words of a text, by its settings alone."""
    if isinstance(settings, LibrarySettings):
        return LibraryNormaliser(settings)
    return TextNormaliser(settings)


def with_plain_symbols(text: str, keep_unknown: bool = False) -> str:
    """Return a text with the model's own symbols spelt as words between brackets, as ``< mask >``.

    Args:
        text: raw text.
        keep_unknown: leave ``<unk>`` as it is, an unknown word.
    """

    def spelt(symbol: re.Match) -> str:
        if keep_unknown and symbol[0].lower() == UNKNOWN:
            return symbol[0]
        return f"< {symbol[1]} >"

    return _SYMBOLS.sub(spelt, text)


class SelectedWords(NamedTuple):
    """The words of some documents of a store; the arrays are as the store's."""

    words: np.ndarray
    sentence_lengths: np.ndarray
    document_sentences: np.ndarray


class WordStore:
    """An existing store; maps an array into memory when it is asked for: not all files need be on this machine."""

    words: np.ndarray
    sentence_lengths: np.ndarray
    document_sentences: np.ndarray
    running_words: np.ndarray
    fingerprints: np.ndarray
    bands: np.ndarray

    def __init__(self, folder: Path):
        self.folder = folder

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in WordStore.__annotations__:
            raise AttributeError(name)
        array = np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        setattr(self, name, array)
        return array

    @cached_property
    def vocabulary(self) -> list[str]:
        """Distinct words of the unit."""
        return split_words((self.folder / VOCABULARY_FILE).read_bytes())

    def select(self, keep: np.ndarray) -> SelectedWords:
        """Return the words of those documents where ``keep``, bool (documents,), is true."""
        keep_sentence = np.repeat(keep, self.document_sentences)
        keep_word = np.repeat(keep_sentence, self.sentence_lengths)
        return SelectedWords(
            self.words[keep_word],
            self.sentence_lengths[keep_sentence],
            self.document_sentences[keep],
        )


class StoreWords(DocumentStep):
    """The last step of a unit: writes ``folder``, whole or not at all, after the last document.

    Takes documents of one sentence a line, words divided by single spaces. Their metadata hold ``running_words``, the
    number of words before normalisation, ``fingerprint``, two numbers of 64 bits, and perhaps ``bands``, as many such
    numbers for every document.
    """

    name = "store"

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder
        self._ids: defaultdict[str, int] = defaultdict(count().__next__)  # a new word gets the next number
        self._words = array("I")
        self._sentence_lengths = array("I")
        self._document_sentences = array("I")
        self._running_words = array("I")
        self._fingerprints = array("Q")
        self._bands = array("Q")

    def run(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents, then write the store."""
        yield from super().run(documents)
        with atomic_folder(self.folder, replace=True, durable=False) as unfinished:
            self._save(unfinished)
            (unfinished / NOTES_FILE).write_text(json.dumps(vars(self.notes), indent=1) + "\n", encoding="utf-8")

    def process(self, document: Document) -> Optional[str]:
        """Process a document; see the class."""
        if not document.text:
            return "no sentence"
        sentences = document.text.split("\n")
        for sentence in sentences:
            words = sentence.split(" ")
            self._words.extend(map(self._ids.__getitem__, words))
            self._sentence_lengths.append(len(words))
        self._document_sentences.append(len(sentences))
        self._running_words.append(document.metadata["running_words"])
        self._fingerprints.extend(document.metadata["fingerprint"])
        self._bands.extend(document.metadata.get("bands", ()))
        return None

    def _save(self, folder: Path) -> None:
        assert "" not in self._ids, "words must be divided by single spaces"
        vocabulary = sorted(self._ids)  # by code points, which is the order of the UTF-8 bytes too
        sorted_id = np.empty(len(vocabulary), dtype=np.uint32)
        sorted_id[[self._ids[word] for word in vocabulary]] = np.arange(len(vocabulary), dtype=np.uint32)
        documents = len(self._document_sentences)
        arrays = {
            "words": sorted_id[np.frombuffer(self._words, dtype=np.uint32)],
            "sentence_lengths": self._sentence_lengths,
            "document_sentences": self._document_sentences,
            "running_words": self._running_words,
            "fingerprints": np.reshape(self._fingerprints, (documents, 2)),
            "bands": np.reshape(self._bands, (documents, len(self._bands) // max(documents, 1))),
        }
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values, allow_pickle=False)
        (folder / VOCABULARY_FILE).write_bytes(join_words(vocabulary))


def join_words(words: Sequence[str]) -> bytes:
    """Return words in UTF-8, a line feed between them."""
    return "\n".join(words).encode()


def split_words(content: bytes) -> list[str]:
    """Undo :func:`join_words`; no word is empty."""
    if content:
        return content.decode().split("\n")
    return []
