"""Minimal pairs: pairs of an acceptable and an unacceptable sentence that differ in a single point of grammar.

BLiMP (Warstadt et al., 2020) consists of 67 files of such pairs. Any folder of JSON lines files with the fields
``sentence_good`` and ``sentence_bad`` can be used.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.checked import parse_json
from lazyformer_fairseq.storage.json_files import read_text

GOOD = "sentence_good"
BAD = "sentence_bad"
PARADIGM = "UID"
PHENOMENON = "linguistics_term"
# The published files have 13 terms for the 12 phenomena in the paper (Warstadt et al., 2020, Table 4).
PHENOMENON_OF_TERM = {"s-selection": "argument_structure"}
REMEDY = f'use a folder of .jsonl files whose lines are objects with "{GOOD}" and "{BAD}"'


@dataclass(frozen=True)
class Pair:
    """A minimal pair: an acceptable and an unacceptable sentence."""

    good: str
    bad: str


@dataclass(frozen=True)
class Paradigm:
    """The pairs in one file, which all test the same point of grammar.

    Attributes:
        name: the `UID` in the file, or else the file's name.
        phenomenon: the linguistic phenomenon that the paradigm belongs to; "" if the file does not contain it.
        pairs: the pairs, in file order.
    """

    name: str
    phenomenon: str
    pairs: tuple[Pair, ...]


def read_paradigms(folder: Path, most_pairs: int = 0) -> list[Paradigm]:
    """Read the paradigms from all files in a folder.

    Args:
        folder: a folder with ``*.jsonl`` files.
        most_pairs: maximum number of pairs per paradigm, which are evenly spaced over the file; 0 for all.

    Returns:
        The paradigms, sorted by name.

    Raises:
        UserError: there are no files, two paradigms have the same name, or a line is not a valid pair (the message
            names file and line).
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"{folder} contains no .jsonl file; {REMEDY}")
    paradigms: dict[str, Paradigm] = {}
    for file in files:
        paradigm = _read_paradigm(file, most_pairs)
        if paradigm.name in paradigms:
            raise UserError(f"{file}: paradigm {paradigm.name} also occurs in another file in this folder")
        paradigms[paradigm.name] = paradigm
    return [paradigms[name] for name in sorted(paradigms)]


def _read_paradigm(file: Path, most_pairs: int) -> Paradigm:
    rows = list(_rows(file))
    if not rows:
        raise UserError(f"{file} is empty; {REMEDY}")
    first = rows[0]
    pairs = [Pair(row[GOOD], row[BAD]) for row in rows]
    if 0 < most_pairs < len(pairs):
        places = np.linspace(0, len(pairs) - 1, most_pairs).round().astype(int)
        pairs = [pairs[place] for place in places]
    term = first.get(PHENOMENON, "")
    return Paradigm(
        name=first.get(PARADIGM, file.stem),
        phenomenon=PHENOMENON_OF_TERM.get(term, term),
        pairs=tuple(pairs),
    )


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object in each line of a file, after checking the fields that are used."""
    for number, line in enumerate(read_text(file, REMEDY).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            row = parse_json(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: this line is not JSON ({error}); {REMEDY}") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: this line is not a JSON object; {REMEDY}")
        for name in (GOOD, BAD):
            if not str(row.get(name, "")).strip():
                raise UserError(f"{where}: {name} is missing or empty; {REMEDY}")
        for name in (GOOD, BAD, PARADIGM, PHENOMENON):
            if not isinstance(row.get(name, ""), str):
                raise UserError(f"{where}: {name} is {row[name]!r}, which is not a string")
        yield row


def readable(name: str) -> str:
    """Convert the name of a paradigm or phenomenon to words: ``npi_licensing`` becomes "npi licensing"."""
    return re.sub(r"[_-]+", " ", name)


def sentences_of(paradigms: Sequence[Paradigm]) -> list[str]:
    """Return all distinct sentences, in order of first occurrence."""
    pairs = [pair for paradigm in paradigms for pair in paradigm.pairs]
    return list(dict.fromkeys(sentence for pair in pairs for sentence in (pair.good, pair.bad)))
