"""The last steps for a unit, which convert cased sentences to the words that BPE sees and store them on disk.

Each unit's words are stored in a folder, the word store:

    STORE/words.npy               uint32 (words,): indices into the unit's vocabulary, in text order
    STORE/sentence_lengths.npy    uint32 (sentences,): words per sentence
    STORE/document_sentences.npy  uint32 (documents,): sentences per document
    STORE/running_words.npy       uint32 (documents,): words (separated by spaces) per document, before normalization
    STORE/fingerprints.npy        uint64 (documents, 2): xxh3_128 of each document, high and low half
    STORE/bands.npy               uint64 (documents, bands): for finding near-duplicates; no columns if not requested
    STORE/vocabulary.bin          the unit's distinct words in UTF-8, sorted by their bytes, joined by line feeds
    STORE/notes.json              the task's notes for the report, see ``steps.py``

A store takes about 0.8 bytes per byte of text. Later stages look up and encode each distinct word in a unit only once.
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
    """The step that converts each line (a cased sentence) to normalized words, separated by single spaces.

    Lines without words are removed, and documents with ``no word`` left are dropped. If a text mentions ``<mask>``,
    ``</s>`` or another of the model's symbols, the symbol is rewritten as plain words, such as ``< mask >``, because
    only the task may mask. The placeholders that cleaning inserts, such as ``<url>``, are kept, and so is the ``<unk>``
    that WikiText has for rare words. If another model's tokenizer is used, that tokenizer handles such symbols itself.
    """

    name = "words"
    settings: Union[TextSettings, LibrarySettings]

    def process(self, document: Document) -> Optional[str]:
        """Normalize a document's words."""
        text = document.text
        document.metadata["running_words"] = len(text.split())
        normalise = load_normaliser(self.settings)
        if "<" in text:
            keep_unknown = document.metadata["format"] == WIKITEXT
            if isinstance(normalise, LibraryNormaliser):
                normalise = partial(normalise, keep_unknown=keep_unknown)
            else:
                text = with_plain_symbols(text, keep_unknown)
        lines = map(normalise, text.split("\n"))
        document.text = "\n".join(filter(None, lines))
        if document.text:
            return None
        return "no word"


@lru_cache(maxsize=1)  # once per process, for any number of units
def load_normaliser(
    settings: Union[TextSettings, LibrarySettings],
) -> Union[TextNormaliser, LibraryNormaliser]:
    """Return the normalizer that converts text to words for a tokenizer with these settings."""
    if isinstance(settings, LibrarySettings):
        return LibraryNormaliser(settings)
    return TextNormaliser(settings)


def with_plain_symbols(text: str, keep_unknown: bool = False) -> str:
    """Rewrite the model's own symbols in a text as plain words, such as ``< mask >``.

    Args:
        text: raw text.
        keep_unknown: whether to keep ``<unk>``, which then counts as an unknown word.
    """

    def spelt(symbol: re.Match) -> str:
        if keep_unknown and symbol[0].lower() == UNKNOWN:
            return symbol[0]
        return f"< {symbol[1]} >"

    return _SYMBOLS.sub(spelt, text)


class SelectedWords(NamedTuple):
    """The words of selected documents, in the same arrays as in a :class:`WordStore`."""

    words: np.ndarray
    sentence_lengths: np.ndarray
    document_sentences: np.ndarray


class WordStore:
    """A unit's stored words; arrays are memory-mapped on first use, so not all files need to be on this machine."""

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
        """The unit's distinct words, sorted by their UTF-8 bytes."""
        return split_words((self.folder / VOCABULARY_FILE).read_bytes())

    def select(self, keep: np.ndarray) -> SelectedWords:
        """Return the words of the documents selected by the mask ``keep``, bool (documents,)."""
        keep_sentence = np.repeat(keep, self.document_sentences)
        keep_word = np.repeat(keep_sentence, self.sentence_lengths)
        return SelectedWords(
            self.words[keep_word],
            self.sentence_lengths[keep_sentence],
            self.document_sentences[keep],
        )


class StoreWords(DocumentStep):
    """The last step for a unit, which writes ``folder`` atomically after the last document.

    Documents must have one sentence per line, with words separated by single spaces. Their metadata must contain
    ``running_words``, the number of words before normalization, and ``fingerprint``, two 64-bit integers. It may also
    contain ``bands``, the same number of 64-bit integers for every document.
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
            notes = json.dumps(vars(self.notes), indent=1)
            (unfinished / NOTES_FILE).write_text(f"{notes}\n", encoding="utf-8")

    def process(self, document: Document) -> Optional[str]:
        """Add a document's words to the store."""
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
        assert "" not in self._ids, "words must be separated by single spaces"
        vocabulary = sorted(self._ids)  # code points sort in the same order as UTF-8 bytes
        unsorted_ids = [self._ids[word] for word in vocabulary]
        sorted_id = np.empty(len(vocabulary), dtype=np.uint32)
        sorted_id[unsorted_ids] = np.arange(len(vocabulary), dtype=np.uint32)

        documents = len(self._document_sentences)
        bands_of_document = len(self._bands) // max(documents, 1)
        arrays = {
            "words": sorted_id[np.frombuffer(self._words, dtype=np.uint32)],
            "sentence_lengths": self._sentence_lengths,
            "document_sentences": self._document_sentences,
            "running_words": self._running_words,
            "fingerprints": np.reshape(self._fingerprints, (documents, 2)),
            "bands": np.reshape(self._bands, (documents, bands_of_document)),
        }
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values, allow_pickle=False)
        (folder / VOCABULARY_FILE).write_bytes(join_words(vocabulary))


def join_words(words: Sequence[str]) -> bytes:
    """Encode words as UTF-8, joined by line feeds."""
    return "\n".join(words).encode()


def split_words(content: bytes) -> list[str]:
    """Split the output of :func:`join_words` into words, none of which may be empty."""
    if content:
        return content.decode().split("\n")
    return []
