"""Reads and writes ``dict.txt`` files.

This package's dictionaries use fairseq's format, with one line ``SYMBOL COUNT`` per symbol. The first four symbols,
``<s> <pad> </s> <unk>``, have ids 0 to 3 and are not written. In models from other libraries, the special symbols have
different ids (embedding rows). The first line of such a model's dictionary lists the special symbols; all symbols
follow:

    #lazyformer:special {"bos": "[CLS]", "pad": "[PAD]", "eos": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}

fairseq's tools reject this line; without it, they would assign a wrong id to every symbol.
"""

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union

from lazyformer_fairseq.data.text.normalisation import FIRST_SYMBOLS, MASK
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.json_files import read_text

SPECIAL_LINE = "#lazyformer:special "
ROLES = ("bos", "pad", "eos", "unk", "mask")
ROLES_OF_FAIRSEQ = dict(zip(ROLES, (*FIRST_SYMBOLS, MASK), strict=True))


class Dictionary:  # noqa: PLW1641  mutable, so it has no hash
    """A vocabulary of symbols with their counts, compatible with fairseq's ``Dictionary``.

    Attributes:
        symbols: symbols in id order.
        count: count of each symbol.
        indices: ids by symbol.
        nspecial: number of special symbols at the start, which are omitted from dict.txt.
    """

    bos_index, pad_index, eos_index, unk_index = range(4)

    def __init__(
        self,
        special: Sequence[str] = FIRST_SYMBOLS,
        add_special_symbols: bool = True,
    ):
        self.bos_word, self.pad_word, self.eos_word, self.unk_word = special
        self.symbols: list[str] = []
        self.count: list[int] = []
        self.indices: dict[str, int] = {}
        if add_special_symbols:
            for symbol in special:
                self.add_symbol(symbol)
        self.nspecial = len(self.symbols)

    def __eq__(self, other: object) -> bool:
        return self.indices == getattr(other, "indices", None)

    def __len__(self) -> int:
        return len(self.symbols)

    def __contains__(self, symbol: str) -> bool:
        return symbol in self.indices

    def __getitem__(self, index: int) -> str:
        if index < len(self.symbols):
            return self.symbols[index]
        return self.unk_word

    def index(self, symbol: str) -> int:
        """Return the id of a symbol, or the id of ``<unk>`` if the dictionary does not contain it."""
        return self.indices.get(symbol, self.unk_index)

    def bos(self) -> int:
        """Return the id of ``<s>``."""
        return self.bos_index

    def pad(self) -> int:
        """Return the id of ``<pad>``."""
        return self.pad_index

    def eos(self) -> int:
        """Return the id of ``</s>``."""
        return self.eos_index

    def unk(self) -> int:
        """Return the id of ``<unk>``."""
        return self.unk_index

    def add_symbol(self, symbol: str, n: int = 1, overwrite: bool = False) -> int:
        """Add a symbol and return its id.

        Args:
            symbol: the symbol.
            n: the count to add.
            overwrite: whether to assign a new id to an existing symbol instead of adding to its count.
        """
        if symbol in self.indices and not overwrite:
            self.count[self.indices[symbol]] += n
        else:
            self.indices[symbol] = len(self.symbols)
            self.symbols.append(symbol)
            self.count.append(n)
        return self.indices[symbol]

    def save(self, file: Union[str, Path]) -> None:
        """Write dict.txt, with one line per symbol and its count."""
        Path(file).write_bytes(dictionary_bytes(self))


class PlacedDictionary(Dictionary):
    """A dictionary with special symbols at arbitrary ids, as in models from other libraries.

    Args:
        symbols: all symbols, including special ones, in id order.
        special: special symbols by role in ``ROLES``.

    Raises:
        UserError: a role has no symbol, two roles share a symbol, or a symbol occurs twice.
    """

    def __init__(self, symbols: Sequence[str], special: Mapping[str, str]):
        has_all_roles = set(special) == set(ROLES)
        are_distinct = len(set(special.values())) == len(special)
        if not (has_all_roles and are_distinct):
            raise UserError(
                f"special symbols {dict(special)}: there must be a different symbol for each of {', '.join(ROLES)}"
            )
        if lacking := sorted(set(special.values()) - set(symbols)):
            raise UserError(f"special symbol {lacking[0]!r} is not in the dictionary")
        if len(set(symbols)) < len(symbols):
            raise UserError("a symbol occurs twice in the dictionary")
        super().__init__([special[role] for role in ROLES[:4]], add_special_symbols=False)
        for symbol in symbols:
            self.add_symbol(symbol)
        self.special = dict(special)
        for role in ROLES[:4]:
            setattr(self, f"{role}_index", self.indices[special[role]])
        self.nspecial = 0  # makes `save` write every symbol


def mask_index_of(dictionary: Dictionary) -> int:
    """Return the id of the mask symbol, ``<mask>`` by default, adding it to the dictionary if necessary."""
    return dictionary.add_symbol(getattr(dictionary, "special", ROLES_OF_FAIRSEQ)["mask"])


def dictionary_of_symbols(symbols: Sequence[str], special: Mapping[str, str]) -> Dictionary:
    """Build a :class:`Dictionary` if the special symbols are fairseq's, else a :class:`PlacedDictionary`.

    Args:
        symbols: all symbols, including special ones, in id order.
        special: special symbols by role in ``ROLES``.
    """
    if tuple(symbols[:4]) != FIRST_SYMBOLS or dict(special) != ROLES_OF_FAIRSEQ:
        return PlacedDictionary(symbols, special)
    dictionary = Dictionary()
    for symbol in symbols[4:]:
        dictionary.add_symbol(symbol)
    return dictionary


def dictionary_bytes(dictionary: Dictionary) -> bytes:
    """Serialize a dictionary to the bytes of ``dict.txt``."""
    head = ""
    if isinstance(dictionary, PlacedDictionary):
        head = f"{SPECIAL_LINE}{json.dumps(dictionary.special)}\n"
    rows = zip(
        dictionary.symbols[dictionary.nspecial :],
        dictionary.count[dictionary.nspecial :],
        strict=True,
    )
    lines = "".join(f"{symbol} {count}\n" for symbol, count in rows)
    return f"{head}{lines}".encode()


def load_dictionary(path: Union[str, Path]) -> Dictionary:
    """Load a dictionary in either format. Nothing in the file is executed or unpickled.

    Raises:
        UserError: the file is missing, is not UTF-8 or contains no symbols; or a line is malformed or repeats a symbol.
    """
    path = Path(path)
    text = read_text(path, "use the output folder of preprocessing, which contains dict.txt")
    lines = io.StringIO(text, newline=None).readlines()
    if lines and lines[0].startswith(SPECIAL_LINE):
        try:
            special = _parse_special(lines[0])
            dictionary = _parse_lines(path, lines, Dictionary(add_special_symbols=False), first=2)
            return PlacedDictionary(dictionary.symbols, special)
        except UserError as error:
            message = str(error)
            if str(path) not in message:
                message = f"{path}: {message}"
            raise UserError(message) from None
    dictionary = _parse_lines(path, lines, Dictionary(), first=1)
    if len(dictionary) == dictionary.nspecial:
        raise UserError(f"{path}: not a dictionary, because it contains no symbols")
    return dictionary


def _parse_lines(path: Path, lines: Sequence[str], dictionary: Dictionary, first: int) -> Dictionary:
    for number, line in enumerate(lines[first - 1 :], start=first):
        symbol, space, count = line.rstrip().rpartition(" ")
        reason = ""
        if not space or not re.fullmatch(r"-?\d{1,18}", count, re.ASCII):
            reason = "the line is malformed"
        elif symbol in dictionary:
            reason = f"the symbol {symbol!r} is repeated"
        if reason:
            raise UserError(f"{path}, line {number}: {reason}; a dictionary has lines of the form 'symbol count'")
        dictionary.add_symbol(symbol, int(count))
    return dictionary


def _parse_special(line: str) -> dict[str, str]:
    try:
        special: Any = json.loads(line[len(SPECIAL_LINE) :])
    except (ValueError, RecursionError) as error:
        raise UserError(f"the first line does not list the special symbols ({error})") from None
    is_valid = isinstance(special, dict) and all(isinstance(symbol, str) for symbol in special.values())
    if not is_valid:
        raise UserError(f"the first line must list the symbols for {', '.join(ROLES)}")
    return special
