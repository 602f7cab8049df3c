"""The texts of language modelling as they are distributed, read a block at a time: words of lines, or characters.

A source counts its symbols and turns its splits into ids; :mod:`prepare` writes them.
"""

import itertools
import string
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Union

import numpy as np
from fairseq.data import Dictionary

from lazyformer_fairseq.errors import UserError

SPLITS = ("train", "valid", "test")
CHARACTERS = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}  # the standard splits, in the file's order
BLOCK = 1 << 22  # bytes read at a time
END_OF_LINE = "</s>"
Progress = Callable[[int], object]  # told how many more bytes have been read


class WordsOfLines:
    """WikiText: ``wiki.SPLIT.tokens``, words with spaces between. Every line, an empty one too, ends in ``</s>``.

    Args:
        folder: that holds the three files.

    Raises:
        UserError: a file is missing or empty.
    """

    unit = "word"

    def __init__(self, folder: Path):
        self.files = {split: Path(folder) / f"wiki.{split}.tokens" for split in SPLITS}
        for path in self.files.values():
            if not path.is_file():
                raise UserError(
                    f"{path}: no such file; give the folder with wiki.train.tokens, .valid. and .test. in it"
                )
            if not path.stat().st_size:
                raise UserError(f"{path}: is empty; download it again")

    def size(self, split: str) -> int:
        return self.files[split].stat().st_size

    def count(self, split: str, progress: Progress) -> Counter:
        """Raises a UserError where the text is not UTF-8, or has a word that is a symbol of fairseq's own."""
        counts: Counter = Counter()
        for words in self._blocks(split, progress):
            counts.update(words)
        return counts

    def encode(self, split: str, dictionary: Dictionary, progress: Progress) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, ids of each item) of a block at a time, an item a line; words not in `dictionary` become ``<unk>``."""
        id_of, unknown = dictionary.indices.get, itertools.repeat(dictionary.unk())
        for words in self._blocks(split, progress):
            ids = np.fromiter(map(id_of, words, unknown), dtype=np.int32, count=len(words))
            ends = np.flatnonzero(ids == dictionary.eos())
            yield ids, np.diff(ends, prepend=-1)

    def _blocks(self, split: str, progress: Progress) -> Iterator[list[str]]:
        """The words of some lines at a time, a ``</s>`` after those of each line."""
        lines_before = 0
        with self.files[split].open("rb") as file:
            while lines := file.readlines(BLOCK):
                block = b"".join(lines)
                text = self._checked(split, block, lines_before)
                ended = text if text.endswith("\n") else f"{text}\n"
                yield ended.replace("\n", f" {END_OF_LINE} ").split()
                lines_before += len(lines)
                progress(len(block))

    def _checked(self, split: str, block: bytes, lines_before: int) -> str:
        """Decodes; raises a UserError with the line for what is not UTF-8 or a symbol of fairseq's own."""
        try:
            text = block.decode("utf-8")
        except UnicodeDecodeError as error:
            line = lines_before + block.count(b"\n", 0, error.start) + 1
            raise UserError(f"{self.files[split]}, line {line}: not UTF-8; download it again") from error
        for symbol in ("<s>", "<pad>", END_OF_LINE):
            if symbol in text and symbol in text.split():
                line = lines_before + text.count("\n", 0, text.index(symbol)) + 1
                raise UserError(f"{self.files[split]}, line {line}: {symbol} means something to fairseq; remove it")
        return text


class Characters:
    """enwik8 or text8: one file, a byte a symbol; in enwik8 the byte's number, in text8 the letter, ``_`` for a space.

    Args:
        file: the file, or the folder that holds it under the corpus' name.
        name: ``enwik8`` or ``text8``.

    Raises:
        UserError: there is no such file, or its size is not what the splits need.
    """

    unit = "character"

    def __init__(self, file: Path, name: str):
        self.file = Path(file) / name if Path(file).is_dir() else Path(file)
        self.name = name
        of_text8 = {ord(letter): letter for letter in string.ascii_lowercase} | {ord(" "): "_"}
        self.symbols = of_text8 if name == "text8" else {byte: str(byte) for byte in range(256)}
        if not self.file.is_file():
            raise UserError(f"{self.file}: no such file; give {name} itself, unpacked, or the folder that it is in")
        if (size := self.file.stat().st_size) != (total := sum(CHARACTERS.values())):
            train, valid, test = CHARACTERS.values()
            raise UserError(
                f"{self.file}: has {size:,} bytes, {name} has {total:,}: the splits need {train:,}, {valid:,} and "
                f"{test:,}; unpack or download it again"
            )

    def size(self, split: str) -> int:
        return CHARACTERS[split]

    def count(self, split: str, progress: Progress) -> Counter:
        """Raises a UserError where text8 has other characters than its own."""
        numbers = np.zeros(256, dtype=np.int64)
        for block in self._blocks(split):
            numbers += np.bincount(block, minlength=256)
            progress(len(block))
        for byte in np.flatnonzero(numbers).tolist():
            if byte not in self.symbols:
                raise UserError(f"{self.file}: has the byte {byte}, but text8 is a to z and spaces; download it again")
        return Counter({symbol: int(numbers[byte]) for byte, symbol in self.symbols.items() if numbers[byte]})

    def encode(self, split: str, dictionary: Dictionary, progress: Progress) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """As above, but the split is one item. Bytes that `dictionary` lacks become ``<unk>``."""
        table = np.full(256, dictionary.unk(), dtype=np.int32)
        for byte, symbol in self.symbols.items():
            table[byte] = dictionary.index(symbol)
        remaining = self.size(split)
        for block in self._blocks(split):
            remaining -= len(block)
            yield table[block], np.array([] if remaining else [self.size(split)], dtype=np.int64)
            progress(len(block))

    def _blocks(self, split: str) -> Iterator[np.ndarray]:
        start = sum(CHARACTERS[before] for before in SPLITS[: SPLITS.index(split)])
        end = start + CHARACTERS[split]
        text = np.memmap(self.file, dtype=np.uint8, mode="r")
        for first in range(start, end, BLOCK):
            yield text[first : min(first + BLOCK, end)]


TextSource = Union[WordsOfLines, Characters]
