"""Reads documents from text files.

Two layouts of a file are known by themselves: WikiText's, where a line ``= Title =`` opens a document, every further
line is a paragraph and ``= = Section = =`` lines are headings (left out); else documents divided by blank lines.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Union

from lazyformer_fairseq.errors import UserError

TITLE = re.compile(r"^ ?= [^=].* = ?$", re.MULTILINE)
HEADING = re.compile(r"^ ?= .* = ?$")
WIKITEXT_JOINT = re.compile(r" @([-,.])@ ")  # WikiText's mark of a hyphen or number that its tokenizer split


class Document(NamedTuple):
    """Paragraphs in order; a sentence never spans two of them."""

    name: str
    paragraphs: tuple[str, ...]


def read_documents(path: Union[str, Path]) -> Iterator[Document]:
    """Documents of a ``.txt`` (or other text) file, or of every ``.txt`` file below a folder, in order of name.

    Raises:
        UserError: nothing there, or a file that is empty or not UTF-8; the message names it.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder")
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: holds no .txt file")
    for file in files:
        yield from divide(read_text(file), str(file))


def read_text(file: Path) -> str:
    """The whole text of a UTF-8 file.

    Raises:
        UserError: it cannot be read, is not UTF-8 (the line is named) or holds nothing but space.
    """
    try:
        content = file.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{file}, line {line}: not UTF-8 text; convert the file to UTF-8 or leave it out") from None
    if "\0" in text:
        raise UserError(
            f"{file}: holds NUL characters, so it is not UTF-8 text (UTF-16 perhaps); convert or leave it out"
        )
    if not text.strip():
        raise UserError(f"{file}: is empty")
    return text.replace("\r\n", "\n")


def divide(text: str, name: str) -> Iterator[Document]:
    """Documents of one file's text, named ``name:number``."""
    documents = _divided_by_titles(text) if TITLE.search(text) else _divided_by_blank_lines(text)
    for number, paragraphs in enumerate(documents, start=1):
        yield Document(f"{name}:{number}", tuple(paragraphs))


def _divided_by_titles(text: str) -> Iterator[list[str]]:
    # What stands before the first title is a document too (mostly empty).
    for body in TITLE.split(text):
        lines = (line.strip() for line in body.splitlines())
        paragraphs = [WIKITEXT_JOINT.sub(r"\1", line) for line in lines if line and not HEADING.match(line)]
        if paragraphs:
            yield paragraphs


def _divided_by_blank_lines(text: str) -> Iterator[list[str]]:
    for block in re.split(r"\n\s*\n", text):
        if block.strip():
            yield [" ".join(block.split())]
