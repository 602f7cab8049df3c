"""Interface of tokenizers: a text becomes ids of one dictionary, an input of the model, and text again.

Folders of two formats hold one, see ``load_tokenizer``. What follows from a few facts about a tokenizer stands here.
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
KNOWN_WORDS = 1 << 18  # a word is encoded once, until so many are known: some 30 MB
WORDS_AT_ONCE = 500  # lists of more words alive at once keep Python's garbage collector busy
BARE_SPACES = ("\u2581", "Ġ")  # symbols of SentencePiece and of byte-level BPE that stand for a space alone
FolderName = Union[str, Path]


_SURROGATE = re.compile("[\ud800-\udfff]")


def refuse_surrogates(text: str) -> None:
    """Raise a UserError for half a character, which JSON can hold and UTF-8 cannot."""
    if not text.isascii() and (found := _SURROGATE.search(text)):
        near = text[max(0, found.start() - 20) : found.end() + 20]
        raise UserError(f"character {found.start() + 1} of a text, {near!r}, is half a surrogate pair; mend the text")


class SpecialIds(NamedTuple):
    """Ids of the symbols that have a part to play: ``<s> <pad> </s> <unk> <mask>``, or other names of these."""

    bos: int
    pad: int
    eos: int
    unk: int
    mask: int


class TextTokenizer(ABC):
    """Text <-> ids of one dictionary.

    Attributes:
        files: names of the folder's files: the description, the model, the dictionary.
        FORMAT_VERSION: version of the folder's format.
        DESCRIPTION: dataclass with the fields of tokenizer.json, ``sha256`` of the other two files among them.
        settings: what is done with a text before it is cut into pieces; hashable, and it can be pickled. Its
            ``special_tokens`` are stand-ins such as ``<url>`` that the corpus leaves in the text, one id each.
        symbols: the symbols of all ids; ids are their places.
        special: ids of the special symbols.
        separators: how many ``</s>`` stand between the texts of a pair: RoBERTa's two, BERT's one.
        second_type: token type of the second text of a pair, for models that have token types; else 0.
        normalise: text -> its words, divided by single spaces. No word's ids depend on another word.
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
        """Read a tokenizer folder; nothing in it is run or unpickled.

        Raises:
            UserError: a file is missing, damaged, of another format version, or does not match the others.
        """
        folder = Path(folder)
        path = folder / SETTINGS_FILE
        content = read_json(path, f"is {folder} a tokenizer folder, copied whole?")
        refuse_other_version(path, content, cls.FORMAT_VERSION)
        description: Any = as_type(cls.DESCRIPTION, content, path, COPY_AGAIN)
        contents = {}
        for name in cls.files[1:]:
            if not (folder / name).is_file():  # to open a pipe is to wait for a writer
                raise UserError(f"{folder / name}: cannot be read (no such file); is {folder} a tokenizer's?")
            try:
                contents[name] = (folder / name).read_bytes()
            except OSError as error:
                raise UserError(
                    f"{folder / name}: cannot be read ({error.strerror}); is {folder} a tokenizer's?"
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
        """Make the tokenizer of a folder from its description and the content of its second file."""

    @classmethod
    def _write(
        cls,
        folder: FolderName,
        description: Mapping[str, Any],
        model: bytes,
        dictionary: Dictionary,
    ) -> Self:
        """Write a tokenizer's folder, whole or not at all, and load it."""
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
        """The symbol that a text holds where the model is to fill something in."""
        return self.symbols[self.special.mask]

    @property
    @abstractmethod
    def begins_word(self) -> np.ndarray:
        """Return which ids begin a word by their symbols, bool (V,); in byte-level BPE those with a space before it."""

    @cached_property
    def dictionary(self) -> Dictionary:
        """The symbols as dict.txt has them."""
        special = {role: self.symbols[index] for role, index in self.special._asdict().items()}
        return dictionary_of_symbols(self.symbols, special)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of raw text, without ``<s>`` and ``</s>``; ``<mask>`` in it is one id, ``</s>`` is text."""

    @abstractmethod
    def encode_normalised(self, words: str) -> list[int]:
        """Return the ids of what :attr:`normalise` returned."""

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """:meth:`encode`, and for each id its characters of ``text``: the first, and one past the last."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Readable text of ids; ``<s>``, ``</s>`` and ``<pad>`` are left out, the other symbols stay."""

    @abstractmethod
    def starts_of_words(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids (T,) of inputs, one after the other, begin a word: bool (T,)."""

    @abstractmethod
    def _ids_of(self, words: list[str]) -> list[list[int]]:
        """Return the ids of each word."""

    def encode_words(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`encode_normalised` of many words at once, each as if it stood alone.

        Returns:
            the ids of all words, one word after the other, and the number of ids of each word; both int64.
        """
        if len(self._known) > KNOWN_WORDS:
            self._known.clear()
        known = self._known  # the ids of each word: int32
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
        """Return whether a text of an input of :meth:`build_input` has unknown tokens and no other but spaces."""
        unk = self.special.unk
        if unk not in ids:
            return False
        return any(
            unk in text and all(index == unk or self.symbols[index] in BARE_SPACES for index in text)
            for text in texts_of_input(ids, self.special.eos)
        )

    def build_input(self, first: str, second: Optional[str] = None) -> list[int]:
        """Return the ids of ``<s> first </s>``, or of a pair as its model joins it: ``<s> first </s></s> second </s>``.

        Cut by :func:`cut_input` what is longer than a model reads, and say so in the words of :func:`told_cut`.
        """
        bos, _, eos, *_ = self.special
        ids = [bos, *self.encode(first), eos]
        if second is not None:
            ids += [*[eos] * (self.separators - 1), *self.encode(second), eos]
        return ids

    def save(self, folder: FolderName) -> None:
        """Copy the tokenizer to ``folder``, whole or not at all; does nothing where the same one already lies there.

        Raises:
            UserError: ``folder`` holds something else.
        """
        folder = Path(folder)
        pairs = [(folder / name, self.folder / name) for name in self.files]
        if all(copy.is_file() and copy.read_bytes() == own.read_bytes() for copy, own in pairs):
            return
        with atomic_folder(folder) as unfinished:
            for name in self.files:
                shutil.copyfile(self.folder / name, unfinished / name)


def cut_input(ids: np.ndarray, max_length: int, eos: int) -> np.ndarray:
    """Return an input, or pair, of :meth:`TextTokenizer.build_input` cut to `max_length` ids; the longer text first.

    Raises a UserError where that leaves no room for text.
    """
    if len(ids) <= max_length:
        return ids
    first, second, *_ = (*texts_of_input(ids, eos), ids[:0])  # without a second text an empty one
    separators = ids[1 + len(first) : len(ids) - 1 - len(second)]
    room = max_length - 2 - len(separators)
    if room < 1:
        raise UserError(f"inputs of {max_length} tokens: too few for a text; give at least 5")
    of_second = min(len(second), max(room // 2, room - len(first)))
    return np.concatenate([ids[:1], first[: room - of_second], separators, second[:of_second], ids[-1:]])


def told_cut(
    count: int,
    total: int,
    longest: int,
    what: str = "texts",
    reader: str = "the model",
) -> str:
    """Return the sentence on inputs that were cut, which whoever gave the texts must read.

    Args:
        count: inputs that were cut.
        total: all inputs.
        longest: ids of an input that the model reads.
        what: the inputs are called.
        reader: the model is called.
    """
    are = "are"
    if count == 1:
        are = "is"
    return (
        f"{count:,} of {total:,} {what} {are} longer than the {longest:,} tokens that {reader} reads; what goes beyond "
        "is cut off"
    )


def lacks_text(ids: np.ndarray, eos: int) -> bool:
    """Return whether a text of an input of :meth:`TextTokenizer.build_input` has no token."""
    return any(len(text) == 0 for text in texts_of_input(ids, eos))


def texts_of_input(ids: np.ndarray, eos: int) -> list[np.ndarray]:
    """Return the ids of the text, or of the two texts, of an input of :meth:`TextTokenizer.build_input`."""
    ends = np.flatnonzero(ids == eos)
    texts = [ids[1 : ends[0]]]
    if len(ends) > 1:
        texts.append(ids[ends[-2] + 1 : ends[-1]])
    return texts


def told_unknown(count: int, total: int, first_line: int) -> str:
    """Return the sentence on rows with a text that :meth:`TextTokenizer.knows_nothing_of`."""
    have = "have"
    if count == 1:
        have = "has"
    return (
        f"{count:,} of {total:,} rows {have} a text of which the tokenizer knows no token, so the model reads nothing "
        f"of it; the first in line {first_line}"
    )
