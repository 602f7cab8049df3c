"""Converts language modeling texts to fairseq's ``SPLIT.bin``, ``SPLIT.idx`` and ``dict.txt``, and adds a manifest.

The texts are read in their distributed form, block by block, as lines of words or as characters. The dictionary is
built from the training split, with the most frequent symbol first, as adaptive embeddings require. Unlike in fairseq,
no symbols are added to pad it to a multiple of 8.
"""

import itertools
import string
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np

from lazyformer_fairseq.data.prepared_folder import MANIFEST
from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.atomic import atomic_folder, refuse_filled_folder
from lazyformer_fairseq.storage.indexed_format import type_of_ids, write_items
from lazyformer_fairseq.storage.json_files import hash_of, read_json, write_json

SPLITS = ("train", "valid", "test")
# The sizes of the standard splits, in file order.
CHARACTERS = {
    "train": 90_000_000,
    "valid": 5_000_000,
    "test": 5_000_000,
}
BLOCK = 1 << 22  # bytes to read at once
END_OF_LINE = "</s>"
ItemBlocks = Iterator[tuple[np.ndarray, np.ndarray]]  # ids and number of ids per item, for blocks of items
Tell = Callable[[int], object]  # receives the number of bytes read since the last call


class WordsOfLines:
    """WikiText from ``wiki.SPLIT.tokens``: words separated by spaces, with ``</s>`` after each line, even an empty one.

    Args:
        folder: the folder that contains the three files.

    Raises:
        UserError: a file is missing or empty.
    """

    unit = "word"

    def __init__(self, folder: Path):
        self.files = {split: Path(folder) / f"wiki.{split}.tokens" for split in SPLITS}
        for path in self.files.values():
            if not path.is_file():
                raise UserError(f"{path}: no such file; pass the folder with wiki.train.tokens and the other two files")
            if not path.stat().st_size:
                raise UserError(f"{path} is empty; download it again")

    def size(self, split: str) -> int:
        """Return the size of a split in bytes."""
        return self.files[split].stat().st_size

    def count(self, split: str, progress: Tell) -> Counter:
        """Count the words; raise a UserError if the text is not UTF-8 or contains one of fairseq's special symbols."""
        return Counter(itertools.chain.from_iterable(self._blocks(split, progress)))

    def encode(self, split: str, dictionary: Dictionary, progress: Tell) -> ItemBlocks:
        """Yield ids and item lengths block by block, with one item per line; unknown words become ``<unk>``."""
        id_of = dictionary.indices.get
        unknown = itertools.repeat(dictionary.unk())
        for words in self._blocks(split, progress):
            ids = np.fromiter(map(id_of, words, unknown), dtype=np.int32, count=len(words))
            ends = np.flatnonzero(ids == dictionary.eos())
            yield ids, np.diff(ends, prepend=-1)

    def _blocks(self, split: str, progress: Tell) -> Iterator[list[str]]:
        """Yield the words of blocks of lines, with ``</s>`` at the end of each line."""
        lines_before = 0
        with self.files[split].open("rb") as file:
            while lines := file.readlines(BLOCK):
                block = b"".join(lines)
                text = self._checked(split, block, lines_before)
                ended = text
                if not text.endswith("\n"):
                    ended = f"{text}\n"
                yield ended.replace("\n", f" {END_OF_LINE} ").split()
                lines_before += len(lines)
                progress(len(block))

    def _checked(self, split: str, block: bytes, lines_before: int) -> str:
        """Decode a block; raise a UserError that names the line if it is not UTF-8 or contains a special symbol."""
        try:
            text = block.decode("utf-8")
        except UnicodeDecodeError as error:
            line = lines_before + block.count(b"\n", 0, error.start) + 1
            raise UserError(f"{self.files[split]}, line {line}: not UTF-8; download the file again") from error
        for symbol in ("<s>", "<pad>", END_OF_LINE):
            if symbol in text and symbol in text.split():
                line = lines_before + text.count("\n", 0, text.index(symbol)) + 1
                raise UserError(f"{self.files[split]}, line {line}: {symbol} is a special symbol in fairseq; remove it")
        return text


class Characters:
    """enwik8 or text8: one file with one symbol per byte.

    In enwik8, a symbol is the value of the byte. In text8, it is the letter, or ``_`` for a space.

    Args:
        file: the file, or the folder that contains it under the name of the corpus.
        name: ``enwik8`` or ``text8``.

    Raises:
        UserError: there is no such file, or its size does not match the splits.
    """

    unit = "character"

    def __init__(self, file: Path, name: str):
        if Path(file).is_dir():
            self.file = Path(file) / name
        else:
            self.file = Path(file)
        self.name = name
        if name == "text8":
            self.symbols = {ord(letter): letter for letter in string.ascii_lowercase}
            self.symbols[ord(" ")] = "_"
        else:
            self.symbols = {byte: str(byte) for byte in range(256)}
        if not self.file.is_file():
            raise UserError(f"{self.file}: no such file; pass the unpacked file {name} or its folder")
        size = self.file.stat().st_size
        total = sum(CHARACTERS.values())
        if size != total:
            train, valid, test = CHARACTERS.values()
            raise UserError(
                f"{self.file} has {size:,} bytes, but {name} should have {total:,} (train {train:,}, valid {valid:,}, "
                f"test {test:,}); unpack or download the file again"
            )

    def size(self, split: str) -> int:
        """Return the size of a split in bytes."""
        return CHARACTERS[split]

    def count(self, split: str, progress: Tell) -> Counter:
        """Count the symbols; raise a UserError if text8 contains anything but a to z and spaces."""
        numbers = np.zeros(256, dtype=np.int64)
        for block in self._blocks(split):
            numbers += np.bincount(block, minlength=256)
            progress(len(block))
        if strange := set(np.flatnonzero(numbers).tolist()) - set(self.symbols):
            raise UserError(
                f"{self.file} contains the byte {min(strange)}, but text8 has only a to z and spaces; download the "
                "file again"
            )
        counts: Counter[str] = Counter()
        for byte, symbol in self.symbols.items():
            if numbers[byte]:
                counts[symbol] = int(numbers[byte])
        return counts

    def encode(self, split: str, dictionary: Dictionary, progress: Tell) -> ItemBlocks:
        """Yield ids and item lengths block by block; a split is a single item, and unknown bytes become ``<unk>``."""
        table = np.full(256, dictionary.unk(), dtype=np.int32)
        for byte, symbol in self.symbols.items():
            table[byte] = dictionary.index(symbol)

        remaining = self.size(split)
        for block in self._blocks(split):
            remaining -= len(block)
            sizes: list[int] = []
            if not remaining:
                sizes = [self.size(split)]
            yield table[block], np.array(sizes, dtype=np.int64)
            progress(len(block))

    def _blocks(self, split: str) -> Iterator[np.ndarray]:
        start = sum(CHARACTERS[before] for before in SPLITS[: SPLITS.index(split)])
        text = np.memmap(self.file, np.uint8, mode="r", offset=start, shape=(CHARACTERS[split],))
        for first in range(0, len(text), BLOCK):
            yield text[first : first + BLOCK]


TextSource = Union[WordsOfLines, Characters]


# Tokens per split and symbols in the training split, both including line ends (Merity et al., 2016), and the MD5 sums
# of whole files, as published by the distributor (mattmahoney.net/dc/textdata.html).
OFFICIAL_COUNTS = {
    "wikitext-2": {
        "train": 2_088_628,
        "valid": 217_646,
        "test": 245_569,
        "vocabulary": 33_278,
    },
    "wikitext-103": {
        "train": 103_227_021,
        "valid": 217_646,
        "test": 245_569,
        "vocabulary": 267_735,
    },
}
OFFICIAL_MD5 = {
    "enwik8": "a1fa5ffddb56f4953e226637dabbb36a",
    "text8": "3bea1919949baf155f99411df5fada7e",
}


def prepare(corpus: str, source: Path, out: Path, official: Optional[str] = None) -> dict[str, Any]:
    """Convert a text to the folder `out`, which is written atomically.

    Args:
        corpus: ``wikitext``, ``enwik8`` or ``text8``.
        source: the folder containing WikiText's three files; for the other corpora, the file or its folder.
        out: a folder that does not exist yet or is empty.
        official: ``wikitext-2``, ``wikitext-103``, ``enwik8`` or ``text8``, to reject all other texts.

    Returns:
        The manifest.

    Raises:
        UserError: the source is missing, empty, too short, not UTF-8, or not the requested official text.
    """
    refuse_filled_folder(out)
    if official is not None and not official.startswith(corpus):
        raise UserError(f"--official {official} is not a version of {corpus}")
    if corpus == "wikitext":
        text = WordsOfLines(source)
    else:
        text = Characters(source, corpus)
    total = text.size("train") + sum(map(text.size, SPLITS))  # the training split is read twice
    with (
        atomic_folder(out) as folder,
        Progress(total=total, desc="preparing", unit="B", unit_scale=True) as bar,
    ):
        counts = text.count("train", bar.update)
        dictionary = Dictionary()
        most_frequent_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        for symbol, count in most_frequent_first:
            if symbol not in dictionary:  # </s> and <unk> are already there
                dictionary.add_symbol(symbol, n=count)
        if len(dictionary) == dictionary.nspecial:
            raise UserError(f"{source}: the training text has no words; download the files again")
        dictionary.save(folder / "dict.txt")

        manifest: dict[str, Any] = {
            "corpus": corpus,
            "unit": text.unit,
            "source": str(Path(source).absolute()),
            "vocabulary": len(counts),
            "splits": {},
        }
        for split in SPLITS:
            blocks = text.encode(split, dictionary, bar.update)
            manifest["splits"][split] = write_split(folder / split, dictionary, blocks)
        manifest["official"] = _official_name(text, manifest)
        if official not in (None, manifest["official"]):
            remedy = "download it again"
            if manifest["official"]:
                remedy = f"use --official {manifest['official']}"
            raise UserError(f"{source} is not {official} ({not_official(manifest, official)}); {remedy}")
        write_json(folder / MANIFEST, manifest)
    return manifest


def write_split(prefix: Path, dictionary: Dictionary, blocks: ItemBlocks) -> dict[str, int]:
    """Write ``prefix.bin`` and ``prefix.idx``; return the counts of tokens, items and unknown tokens.

    Args:
        prefix: path without the suffix.
        dictionary: the dictionary for the ids.
        blocks: ids and number of ids per item, for blocks of items.
    """
    counts = Counter(tokens=0, items=0, unknown=0)

    def counted() -> ItemBlocks:
        for ids, sizes in blocks:
            unknown = int((ids == dictionary.unk()).sum())
            counts.update(tokens=len(ids), items=len(sizes), unknown=unknown)
            yield ids, sizes

    write_items(prefix, type_of_ids(len(dictionary)), counted(), durable=False)
    return dict(counts)


def _official_name(text: TextSource, manifest: dict[str, Any]) -> Optional[str]:
    """Return the name of the official text that this text equals, or None."""
    if isinstance(text, Characters):
        if hash_of(text.file, "md5") == OFFICIAL_MD5[text.name]:
            return text.name
        return None
    for name in OFFICIAL_COUNTS:
        if not not_official(manifest, name):
            return name
    return None


def not_official(manifest: dict[str, Any], name: Optional[str] = None) -> str:
    """Describe the differences from an official text; return an empty string if there are none.

    Args:
        manifest: the text's manifest.
        name: name of the official text; by default the most similar one.
    """
    if manifest["unit"] == "character":
        return f"its MD5 is not {OFFICIAL_MD5[manifest['corpus']]}"
    found = {split: counts["tokens"] for split, counts in manifest["splits"].items()}
    found["vocabulary"] = manifest["vocabulary"]
    if name is None:
        name = min(
            OFFICIAL_COUNTS,
            key=lambda name: abs(OFFICIAL_COUNTS[name]["train"] - found["train"]),
        )
    differences = []
    for key, number in OFFICIAL_COUNTS[name].items():
        if found[key] != number:
            differences.append(f"the {key} size is {found[key]:,}, but in {name} it is {number:,}")
    return "; ".join(differences)


def overview(manifest: dict[str, Any]) -> str:
    """Return a summary of the manifest: a table of the splits, and whether the text is an official one."""
    items = "items"
    if manifest["unit"] == "word":
        items = f"lines, each with {END_OF_LINE}"
    rows = []
    for split, counts in manifest["splits"].items():
        rows.append(
            {
                "split": split,
                f"{manifest['unit']}s": f"{counts['tokens']:,}",
                items: f"{counts['items']:,}",
                "<unk>": f"{counts['unknown']:,}",
            }
        )
    verdict = f"these are the official counts of {manifest['official']}"
    if not manifest["official"]:
        verdict = f"NOT an official text, so results cannot be compared with published ones: {not_official(manifest)}"
    return f"{Table('', rows).printed('simple')}\nvocabulary: {manifest['vocabulary']:,}\n{verdict}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a prepared folder; raise a UserError if there is none."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise UserError(f"{path}: no such file; pass a folder written by `lazyformer lm prepare`")
    return read_json(path)
