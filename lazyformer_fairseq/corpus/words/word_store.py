"""The words of one unit of input on disk: the one form of the text that the later stages read.

    STORE/words.npy               uint32 (words,): rows of the unit's vocabulary, in the order of the text
    STORE/sentence_lengths.npy    uint32 (sentences,): words of each sentence
    STORE/document_sentences.npy  uint32 (documents,): sentences of each document
    STORE/fingerprints.npy        uint64 (documents, 2): xxh3_128 of each document, high and low half
    STORE/bands.npy               uint64 (documents, bands): for near-duplicates; no columns without them
    STORE/vocabulary.bin          the unit's distinct words in UTF-8, sorted by their bytes, a line feed between them

Some 0.8 bytes for each byte of text. Counting or looking up words happens once for each distinct word of a unit.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCABULARY_FILE = "vocabulary.bin"


class SelectedWords(NamedTuple):
    """The words of some documents of a store; the arrays are as the store's."""

    words: np.ndarray
    sentence_lengths: np.ndarray
    document_sentences: np.ndarray


class WordStore:
    """An existing store; maps each array into memory on first use."""

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def open(cls, folder: Path) -> "WordStore":
        return cls(Path(folder))

    @cached_property
    def words(self) -> np.ndarray:
        return self._mapped("words")

    @cached_property
    def sentence_lengths(self) -> np.ndarray:
        return self._mapped("sentence_lengths")

    @cached_property
    def document_sentences(self) -> np.ndarray:
        return self._mapped("document_sentences")

    @cached_property
    def fingerprints(self) -> np.ndarray:
        return self._mapped("fingerprints")

    @cached_property
    def bands(self) -> np.ndarray:
        return self._mapped("bands")

    @cached_property
    def vocabulary(self) -> list[str]:
        return split_words((self.folder / VOCABULARY_FILE).read_bytes())

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_sentences)

    def select(self, keep: np.ndarray) -> SelectedWords:
        """The words of those documents where ``keep``, bool (documents,), is true."""
        keep_sentence = np.repeat(keep, self.document_sentences)
        keep_word = np.repeat(keep_sentence, self.sentence_lengths)
        return SelectedWords(self.words[keep_word], self.sentence_lengths[keep_sentence], self.document_sentences[keep])

    def texts(self) -> Iterator[str]:
        """Each document again: one sentence a line, its words divided by single spaces."""
        words = iter(self.words.tolist())
        sentence_lengths = iter(self.sentence_lengths.tolist())
        for sentences in self.document_sentences.tolist():
            lengths = [next(sentence_lengths) for _ in range(sentences)]
            yield "\n".join(" ".join(self.vocabulary[next(words)] for _ in range(length)) for length in lengths)

    def _mapped(self, name: str) -> np.ndarray:
        return np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)


def save_store(folder: Path, arrays: dict[str, np.ndarray], vocabulary: Sequence[str]) -> None:
    """Writes the files of a store into ``folder``, which exists; ``arrays`` by the names of the files."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    (folder / VOCABULARY_FILE).write_bytes(join_words(vocabulary))


def join_words(words: Sequence[str]) -> bytes:
    return "\n".join(words).encode()


def split_words(content: bytes) -> list[str]:
    """Undoes :func:`join_words`; no word is empty."""
    return content.decode().split("\n") if content else []
