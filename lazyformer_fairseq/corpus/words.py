"""The last steps of a unit: they turn cased sentences into the words that BPE sees, and store these on disk.

    STORE/words.npy               uint32 (words,): rows of the unit's vocabulary, in the order of the text
    STORE/sentence_lengths.npy    uint32 (sentences,): words of each sentence
    STORE/document_sentences.npy  uint32 (documents,): sentences of each document
    STORE/running_words.npy       uint32 (documents,): words of each document, between spaces, before normalisation
    STORE/fingerprints.npy        uint64 (documents, 2): xxh3_128 of each document, high and low half
    STORE/bands.npy               uint64 (documents, bands): for near-duplicates; no columns without them
    STORE/vocabulary.bin          the unit's distinct words in UTF-8, sorted by their bytes, joined by line feeds
    STORE/notes.json              the task's notes for the report, see ``steps.py``

A store takes about 0.8 bytes per byte of text. The later stages count and look up each distinct word of a unit once.
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
    """The step that turns each line, a cased sentence, into its normalised words, separated by single spaces.

    Lines without words are removed, and documents with ``no word`` left are dropped. If a text mentions ``<mask>``,
    ``</s>`` or another symbol of the model, the symbol is written as plain words, like ``< mask >``, because only the
    task may mask. The placeholders that cleaning inserts, such as ``<url>``, stay, and so does the ``<unk>`` that
    stands for rare words in WikiText. A tokenizer from another model does this by itself.
    """

    name = "words"
    settings: Union[TextSettings, LibrarySettings]

    def process(self, document: Document) -> Optional[str]:
        """Normalise the words of a document."""
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
    """Return the normaliser, which turns text into a tokenizer's words, for the tokenizer's settings."""
    if isinstance(settings, LibrarySettings):
        return LibraryNormaliser(settings)
    return TextNormaliser(settings)


def with_plain_symbols(text: str, keep_unknown: bool = False) -> str:
    """Return a text with the model's own symbols spelt as plain words, such as ``< mask >``.

    Args:
        text: raw text.
        keep_unknown: whether ``<unk>`` stays as it is and counts as an unknown word.
    """

    def spelt(symbol: re.Match) -> str:
        if keep_unknown and symbol[0].lower() == UNKNOWN:
            return symbol[0]
        return f"< {symbol[1]} >"

    return _SYMBOLS.sub(spelt, text)


class SelectedWords(NamedTuple):
    """The words of some documents of a store, in arrays like those of the store."""

    words: np.ndarray
    sentence_lengths: np.ndarray
    document_sentences: np.ndarray


class WordStore:
    """An existing store; each array is memory-mapped at its first use, so not all files need to be on this machine."""

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
        """The distinct words of the unit, sorted by their UTF-8 bytes."""
        return split_words((self.folder / VOCABULARY_FILE).read_bytes())

    def select(self, keep: np.ndarray) -> SelectedWords:
        """Return the words of the documents for which ``keep``, bool (documents,), is true."""
        keep_sentence = np.repeat(keep, self.document_sentences)
        keep_word = np.repeat(keep_sentence, self.sentence_lengths)
        return SelectedWords(
            self.words[keep_word],
            self.sentence_lengths[keep_sentence],
            self.document_sentences[keep],
        )


class StoreWords(DocumentStep):
    """The last step of a unit, which writes ``folder`` after the last document, whole or not at all.

    Documents must have one sentence per line, with words separated by single spaces. Their metadata must contain
    ``running_words``, the number of words before normalisation, and ``fingerprint``, two 64-bit integers. It may also
    contain ``bands``, 64-bit integers whose number is the same for every document.
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
        """Add the words of a document to the store."""
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
        vocabulary = sorted(self._ids)  # the order of code points is also that of the UTF-8 bytes
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
    """Return words in UTF-8, joined by line feeds."""
    return "\n".join(words).encode()


def split_words(content: bytes) -> list[str]:
    """Return the words that :func:`join_words` joined, none of which may be empty."""
    if content:
        return content.decode().split("\n")
    return []
