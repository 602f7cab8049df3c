"""The tokenizer interface: conversion of text to ids and model inputs, and of ids back to text.

A tokenizer is stored in a folder in one of two formats, both of which ``load_tokenizer`` supports. The parts that do
not depend on the format are implemented here.
"""

import hashlib
import json
import re
import shutil
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Optional, Self, Union

import numpy as np

from lazyformer_fairseq.data.text.dictionary_file import Dictionary, dictionary_bytes, dictionary_of_symbols
from lazyformer_fairseq.data.text.normalisation import COPY_AGAIN
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.checked import as_type
from lazyformer_fairseq.storage.json_files import read_json, refuse_other_version

DICTIONARY_FILE = "dict.txt"
SETTINGS_FILE = "tokenizer.json"
KNOWN_WORDS = 1 << 18  # maximum number of words with cached ids, about 30 MB
WORDS_AT_ONCE = 500  # longer lists of encoded words keep Python's garbage collector busy
BARE_SPACES = ("\u2581", "Ġ")  # symbols for a single space in SentencePiece and in byte-level BPE
FolderName = Union[str, Path]


_SURROGATE = re.compile("[\ud800-\udfff]")


def refuse_surrogates(text: str) -> None:
    """Raise a UserError if the text contains an unpaired surrogate, which JSON can represent but UTF-8 cannot."""
    if not text.isascii() and (found := _SURROGATE.search(text)):
        near = text[max(0, found.start() - 20) : found.end() + 20]
        raise UserError(
            f"unpaired surrogate at character {found.start() + 1} of a text, in {near!r}; remove the surrogate"
        )


class SpecialIds(NamedTuple):
    """Ids of the special symbols that serve as ``<s> <pad> </s> <unk> <mask>``, whatever their names."""

    bos: int
    pad: int
    eos: int
    unk: int
    mask: int


class TextTokenizer(ABC):
    """The base class of tokenizers, which convert between text and the ids of a dictionary.

    Attributes:
        files: file names in the folder: description, model and dictionary.
        FORMAT_VERSION: version of the folder's format.
        DESCRIPTION: dataclass of the fields in tokenizer.json, including ``sha256`` of the other two files.
        settings: settings for normalizing text before it is split into pieces; hashable and picklable. Their
            ``special_tokens`` are placeholders that corpus cleaning leaves in the text, such as ``<url>``; each has
            one id.
        symbols: all symbols in id order.
        special: ids of the special symbols.
        separators: number of ``</s>`` between the texts of a pair: two as in RoBERTa, one as in BERT.
        second_type: token type of the second text of a pair in models with token types, otherwise 0.
        normalise: callable that splits a text into words separated by single spaces. The ids of a word do not depend on
            other words.
    """

    files: ClassVar[tuple[str, str, str]]
    FORMAT_VERSION: ClassVar[int]
    DESCRIPTION: ClassVar[type]
    separators: int = 2
    second_type: int = 0
    symbols: Sequence[str]
    special: SpecialIds
    normalise: Callable[[str], str]

    def __init__(self, folder: Path):
        self.folder = folder
        self._known: dict[str, bytes] = {}

    @classmethod
    def load(cls, folder: FolderName) -> Self:
        """Load a tokenizer folder. Nothing in it is executed or unpickled.

        Raises:
            UserError: a file is missing or damaged, has an unsupported format version, or does not match the others.
        """
        folder = Path(folder)
        path = folder / SETTINGS_FILE
        content = read_json(path, f"is {folder} a complete tokenizer folder?")
        refuse_other_version(path, content, cls.FORMAT_VERSION)
        description: Any = as_type(cls.DESCRIPTION, content, path, COPY_AGAIN)
        contents = {}
        for name in cls.files[1:]:
            if not (folder / name).is_file():  # opening a pipe would wait for a writer
                raise UserError(f"{folder / name}: cannot be read (no such file); is {folder} a tokenizer folder?")
            try:
                contents[name] = (folder / name).read_bytes()
            except OSError as error:
                raise UserError(
                    f"{folder / name}: cannot be read ({error.strerror}); is {folder} a tokenizer folder?"
                ) from None
            if description.sha256.get(name) != hashlib.sha256(contents[name]).hexdigest():
                raise UserError(
                    f"{folder / name}: this file does not match {SETTINGS_FILE} (its sha256 differs); {COPY_AGAIN}"
                )

        _, model_file, dictionary_file = cls.files
        try:
            tokenizer = cls._of(folder, description, contents[model_file])
            dictionary = dictionary_bytes(tokenizer.dictionary)
        except UserError as error:
            if str(folder) in str(error):
                raise
            raise UserError(f"{folder / model_file}: {error}") from None
        if dictionary != contents[dictionary_file]:
            raise UserError(f"{folder / dictionary_file}: the symbols do not match {folder / model_file}")
        return tokenizer

    @classmethod
    @abstractmethod
    def _of(cls, folder: Path, description: Any, model: bytes) -> Self:
        """Build a folder's tokenizer from its description and the contents of its model file."""

    @classmethod
    def _write(
        cls,
        folder: FolderName,
        description: Mapping[str, Any],
        model: bytes,
        dictionary: Dictionary,
    ) -> Self:
        """Write a tokenizer folder atomically and load it."""
        settings_file, model_file, dictionary_file = cls.files
        contents = {model_file: model, dictionary_file: dictionary_bytes(dictionary)}
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        described = {"format_version": cls.FORMAT_VERSION, **description, "sha256": hashes}
        text = json.dumps(described, indent=2, ensure_ascii=False)
        contents[settings_file] = f"{text}\n".encode()
        with atomic_folder(Path(folder)) as unfinished:
            for name, content in contents.items():
                (unfinished / name).write_bytes(content)
        return cls.load(folder)

    @property
    def mask_index(self) -> int:
        """Id of ``<mask>``."""
        return self.special.mask

    @property
    def mask_word(self) -> str:
        """Symbol that marks the positions in a text that the model should predict."""
        return self.symbols[self.special.mask]

    @property
    @abstractmethod
    def begins_word(self) -> np.ndarray:
        """Mask of the ids with symbols that begin a word, bool (V,).

        In byte-level BPE, these are the symbols that contain the space before a word.
        """

    @cached_property
    def dictionary(self) -> Dictionary:
        """The dictionary of all symbols, as written to dict.txt."""
        special = {role: self.symbols[index] for role, index in self.special._asdict().items()}
        return dictionary_of_symbols(self.symbols, special)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Encode raw text without adding ``<s>`` and ``</s>``.

        ``<mask>`` in the text is encoded as a symbol with one id, whereas ``</s>`` is treated as ordinary text.
        """

    @abstractmethod
    def encode_normalised(self, words: str) -> list[int]:
        """Encode text that was already normalized by :attr:`normalise`."""

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode raw text like :meth:`encode`, and return the ids with their character spans in ``text``.

        A span consists of a start and an exclusive end.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to readable text, omitting ``<s>``, ``</s>`` and ``<pad>`` but keeping other symbols."""

    @abstractmethod
    def starts_of_words(self, ids: np.ndarray) -> np.ndarray:
        """Return a mask of the ids (T,) that begin a word in one or more concatenated inputs, bool (T,)."""

    @abstractmethod
    def _ids_of(self, words: list[str]) -> list[list[int]]:
        """Return the ids of each word."""

    def encode_words(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode a batch of normalized words independently of each other.

        Returns:
            The concatenated ids of all words, and the number of ids per word; both int64.
        """
        if len(self._known) > KNOWN_WORDS:
            self._known.clear()
        known = self._known  # the ids of each word as int32 bytes
        new = list({word: None for word in words if word not in known})
        for start in range(0, len(new), WORDS_AT_ONCE):
            batch = new[start : start + WORDS_AT_ONCE]
            for word, ids_of_word in zip(batch, self._ids_of(batch), strict=True):
                known[word] = array("i", ids_of_word).tobytes()

        found = [known[word] for word in words]
        bytes_of_words = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
        lengths = bytes_of_words // array("i").itemsize
        ids = np.frombuffer(b"".join(found), dtype=np.intc).astype(np.int64)
        return ids, lengths

    def has_only_unknown_tokens(self, ids: np.ndarray) -> bool:
        """Return True if a text in an input of :meth:`build_input` consists only of unknown tokens and spaces."""
        unk = self.special.unk
        if unk not in ids:
            return False
        for text in texts_of_input(ids, self.special.eos):
            if unk in text and all(index == unk or self.symbols[index] in BARE_SPACES for index in text):
                return True
        return False

    def build_input(self, first: str, second: Optional[str] = None) -> list[int]:
        """Encode ``<s> first </s>``, or a pair in the model's format, such as ``<s> first </s></s> second </s>``.

        Callers use :func:`cut_input` to truncate inputs that exceed the model's maximum length, and report this with
        :func:`truncation_message`.
        """
        bos, _, eos, *_ = self.special
        ids = [bos, *self.encode(first), eos]
        if second is not None:
            ids += [*[eos] * (self.separators - 1), *self.encode(second), eos]
        return ids

    def save(self, folder: FolderName) -> None:
        """Copy the tokenizer to ``folder`` atomically, unless it already contains the same tokenizer.

        Raises:
            UserError: ``folder`` contains something else.
        """
        folder = Path(folder)
        pairs = [(folder / name, self.folder / name) for name in self.files]
        is_saved = all(copy.is_file() and copy.read_bytes() == own.read_bytes() for copy, own in pairs)
        if is_saved:
            return
        with atomic_folder(folder) as unfinished:
            for name in self.files:
                shutil.copyfile(self.folder / name, unfinished / name)


def cut_input(ids: np.ndarray, max_length: int, eos: int) -> np.ndarray:
    """Truncate an input from :meth:`TextTokenizer.build_input` (a text or a pair) to `max_length` ids.

    The longer text of a pair is truncated first.

    Raises:
        UserError: `max_length` leaves no room for text.
    """
    if len(ids) <= max_length:
        return ids
    first, second, *_ = (*texts_of_input(ids, eos), ids[:0])  # a missing second text counts as empty
    separators = ids[1 + len(first) : len(ids) - 1 - len(second)]
    room = max_length - 2 - len(separators)
    if room < 1:
        raise UserError(f"inputs of {max_length} tokens are too short for any text; use at least 5 tokens")
    of_second = min(len(second), max(room // 2, room - len(first)))
    of_first = room - of_second
    return np.concatenate([ids[:1], first[:of_first], separators, second[:of_second], ids[-1:]])


def truncation_message(
    count: int,
    total: int,
    longest: int,
    what: str = "texts",
    reader: str = "the model",
) -> str:
    """Return a message about truncated inputs.

    Args:
        count: number of truncated inputs.
        total: number of all inputs.
        longest: maximum length of an input in tokens.
        what: noun for the inputs, in the plural.
        reader: name of the model.
    """
    are = "are"
    if count == 1:
        are = "is"
    return (
        f"{count:,} of {total:,} {what} {are} longer than the {longest:,} tokens that {reader} reads; the excess is "
        "truncated"
    )


def lacks_text(ids: np.ndarray, eos: int) -> bool:
    """Return True if a text in an input of :meth:`TextTokenizer.build_input` is empty."""
    return any(len(text) == 0 for text in texts_of_input(ids, eos))


def texts_of_input(ids: np.ndarray, eos: int) -> list[np.ndarray]:
    """Split an input of :meth:`TextTokenizer.build_input` into the ids of its one or two texts."""
    ends = np.flatnonzero(ids == eos)
    texts = [ids[1 : ends[0]]]
    if len(ends) > 1:
        texts.append(ids[ends[-2] + 1 : ends[-1]])
    return texts


def unknown_text_message(count: int, total: int, first_line: int) -> str:
    """Return a message about rows with a text that has no known tokens.

    Args:
        count: number of rows for which :meth:`TextTokenizer.has_only_unknown_tokens` is true.
        total: number of all rows.
        first_line: line number of the first of these rows.
    """
    have = "have"
    if count == 1:
        have = "has"
    return (
        f"{count:,} of {total:,} rows {have} a text without known tokens, which the model cannot read; the first is in "
        f"line {first_line}"
    )
