"""Interface of the tokenizers, which convert text to ids and model inputs, and ids back to text.

A tokenizer is stored in a folder of one of two formats; ``load_tokenizer`` reads both. Everything that does not depend
on the format is implemented here.
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
KNOWN_WORDS = 1 << 18  # words whose ids are cached, about 30 MB
WORDS_AT_ONCE = 500  # longer lists of encoded words keep Python's garbage collector busy
BARE_SPACES = ("\u2581", "Ġ")  # the symbols for a single space in SentencePiece and in byte-level BPE
FolderName = Union[str, Path]


_SURROGATE = re.compile("[\ud800-\udfff]")


def refuse_surrogates(text: str) -> None:
    """Raise a UserError if the text contains half a surrogate pair, which JSON can represent but UTF-8 cannot."""
    if not text.isascii() and (found := _SURROGATE.search(text)):
        near = text[max(0, found.start() - 20) : found.end() + 20]
        raise UserError(f"character {found.start() + 1} of a text, {near!r}, is half a surrogate pair; repair the text")


class SpecialIds(NamedTuple):
    """Ids of the special symbols ``<s> <pad> </s> <unk> <mask>``, whatever the model calls them."""

    bos: int
    pad: int
    eos: int
    unk: int
    mask: int


class TextTokenizer(ABC):
    """Base class of tokenizers, which convert between text and the ids of one dictionary.

    Attributes:
        files: the names of the folder's files: the description, the model and the dictionary.
        FORMAT_VERSION: the version of the folder's format.
        DESCRIPTION: the dataclass with the fields of tokenizer.json, which include ``sha256`` of the other two files.
        settings: the settings that normalise a text before it is split into pieces; hashable and picklable. Their
            ``special_tokens`` are placeholders such as ``<url>`` that corpus cleaning leaves in the text, one id each.
        symbols: all symbols; the id of a symbol is its index.
        special: the ids of the special symbols.
        separators: the number of ``</s>`` between the texts of a pair: two as in RoBERTa, one as in BERT.
        second_type: the token type of the second text of a pair in models that have token types, otherwise 0.
        normalise: callable that turns a text into its words, separated by single spaces. The ids of a word do not
            depend on other words.
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
        """Read a tokenizer folder. Nothing in it is executed or unpickled.

        Raises:
            UserError: a file is missing, is damaged, has another format version or does not match the other files.
        """
        folder = Path(folder)
        path = folder / SETTINGS_FILE
        content = read_json(path, f"is {folder} a tokenizer folder, copied whole?")
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
                    f"{folder / name}: is not the file that {SETTINGS_FILE} was written with (sha256 differs); "
                    f"{COPY_AGAIN}"
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
            raise UserError(f"{folder / dictionary_file}: its symbols are not those of {folder / model_file}")
        return tokenizer

    @classmethod
    @abstractmethod
    def _of(cls, folder: Path, description: Any, model: bytes) -> Self:
        """Build the tokenizer of a folder from its description and the content of its model file."""

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
        contents[settings_file] = (json.dumps(described, indent=2, ensure_ascii=False) + "\n").encode()
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
        """The symbol that marks the places in a text which the model is to fill in."""
        return self.symbols[self.special.mask]

    @property
    @abstractmethod
    def begins_word(self) -> np.ndarray:
        """Return which ids have a symbol that begins a word, bool (V,).

        In byte-level BPE these are the symbols that contain the space before a word.
        """

    @cached_property
    def dictionary(self) -> Dictionary:
        """The symbols as a dictionary, as written to dict.txt."""
        special = {role: self.symbols[index] for role, index in self.special._asdict().items()}
        return dictionary_of_symbols(self.symbols, special)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of raw text, without ``<s>`` and ``</s>`` around it.

        In the text ``<mask>`` is read as a symbol, with one id, while ``</s>`` is read as ordinary text.
        """

    @abstractmethod
    def encode_normalised(self, words: str) -> list[int]:
        """Return the ids of text that :attr:`normalise` has normalised."""

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of raw text, as :meth:`encode`, and the span of characters in ``text`` of each id.

        A span is the index of the first character and the index after the last one.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the readable text of ids, without ``<s>``, ``</s>`` and ``<pad>`` but with the other symbols."""

    @abstractmethod
    def starts_of_words(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids (T,) of one or more concatenated inputs begin a word, bool (T,)."""

    @abstractmethod
    def _ids_of(self, words: list[str]) -> list[list[int]]:
        """Return the ids of each word."""

    def encode_words(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode many normalised words at once, each independently of the others.

        Returns:
            The concatenated ids of all words, and the number of ids of each word; both int64.
        """
        if len(self._known) > KNOWN_WORDS:
            self._known.clear()
        known = self._known  # the ids of each word as int32 bytes
        new = list({word: None for word in words if word not in known})
        for start in range(0, len(new), WORDS_AT_ONCE):
            batch = new[start : start + WORDS_AT_ONCE]
            known.update(
                (word, array("i", ids).tobytes()) for word, ids in zip(batch, self._ids_of(batch), strict=True)
            )
        found = [known[word] for word in words]
        lengths = np.fromiter(map(len, found), dtype=np.int64, count=len(found)) // array("i").itemsize
        return np.frombuffer(b"".join(found), dtype=np.intc).astype(np.int64), lengths

    def knows_nothing_of(self, ids: np.ndarray) -> bool:
        """Return whether a text in an input of :meth:`build_input` consists of unknown tokens and spaces only."""
        unk = self.special.unk
        if unk not in ids:
            return False
        return any(
            unk in text and all(index == unk or self.symbols[index] in BARE_SPACES for index in text)
            for text in texts_of_input(ids, self.special.eos)
        )

    def build_input(self, first: str, second: Optional[str] = None) -> list[int]:
        """Return the ids of ``<s> first </s>``, or of a pair as the model joins it: ``<s> first </s></s> second </s>``.

        The caller shortens inputs that exceed the model's maximum length with :func:`cut_input`, and reports this with
        :func:`told_cut`.
        """
        bos, _, eos, *_ = self.special
        ids = [bos, *self.encode(first), eos]
        if second is not None:
            ids += [*[eos] * (self.separators - 1), *self.encode(second), eos]
        return ids

    def save(self, folder: FolderName) -> None:
        """Copy the tokenizer to ``folder`` atomically, unless the same tokenizer is there already.

        Raises:
            UserError: ``folder`` contains something else.
        """
        folder = Path(folder)
        pairs = [(folder / name, self.folder / name) for name in self.files]
        if all(copy.is_file() and copy.read_bytes() == own.read_bytes() for copy, own in pairs):
            return
        with atomic_folder(folder) as unfinished:
            for name in self.files:
                shutil.copyfile(self.folder / name, unfinished / name)


def cut_input(ids: np.ndarray, max_length: int, eos: int) -> np.ndarray:
    """Shorten an input of :meth:`TextTokenizer.build_input`, a text or a pair, to `max_length` ids.

    Of a pair, the longer text is shortened first.

    Raises:
        UserError: `max_length` leaves no room for text.
    """
    if len(ids) <= max_length:
        return ids
    first, second, *_ = (*texts_of_input(ids, eos), ids[:0])  # a missing second text counts as empty
    separators = ids[1 + len(first) : len(ids) - 1 - len(second)]
    room = max_length - 2 - len(separators)
    if room < 1:
        raise UserError(f"inputs of {max_length} tokens: too short for any text; give at least 5")
    of_second = min(len(second), max(room // 2, room - len(first)))
    return np.concatenate([ids[:1], first[: room - of_second], separators, second[:of_second], ids[-1:]])


def told_cut(
    count: int,
    total: int,
    longest: int,
    what: str = "texts",
    reader: str = "the model",
) -> str:
    """Return the sentence that tells the user how many inputs were truncated.

    Args:
        count: the number of truncated inputs.
        total: the number of all inputs.
        longest: the maximum length of an input in tokens.
        what: the word for the inputs, in the plural.
        reader: the word for the model.
    """
    are = "are"
    if count == 1:
        are = "is"
    return (
        f"{count:,} of {total:,} {what} {are} longer than the {longest:,} tokens that {reader} reads; the rest is "
        "cut off"
    )


def lacks_text(ids: np.ndarray, eos: int) -> bool:
    """Return whether a text in an input of :meth:`TextTokenizer.build_input` is empty."""
    return any(len(text) == 0 for text in texts_of_input(ids, eos))


def texts_of_input(ids: np.ndarray, eos: int) -> list[np.ndarray]:
    """Return the ids of the one or two texts in an input of :meth:`TextTokenizer.build_input`."""
    ends = np.flatnonzero(ids == eos)
    texts = [ids[1 : ends[0]]]
    if len(ends) > 1:
        texts.append(ids[ends[-2] + 1 : ends[-1]])
    return texts


def told_unknown(count: int, total: int, first_line: int) -> str:
    """Return the sentence that tells the user how many rows have a text without any known token.

    Args:
        count: the number of rows for which :meth:`TextTokenizer.knows_nothing_of` is true.
        total: the number of all rows.
        first_line: the line of the first such row.
    """
    have = "have"
    if count == 1:
        have = "has"
    return (
        f"{count:,} of {total:,} rows {have} a text in which the tokenizer knows no token, so the model cannot read "
        f"it; the first is in line {first_line}"
    )
