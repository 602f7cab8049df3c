"""Finds the input files and the format of each: by its name, and by its first bytes once decompressed."""

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from lazyformer_fairseq.corpus.readers.blocks import BOM
from lazyformer_fairseq.corpus.readers.compressed import BadInput, open_decompressed
from lazyformer_fairseq.corpus.readers.documents import FORMATS
from lazyformer_fairseq.corpus.readers.formats.book import GUTENBERG_START
from lazyformer_fairseq.errors import UserError

HEAD_BYTES = 1 << 16
COMPRESSED = r"(?:\.(?:gz|bz2|zst))?"
KNOWN_NAME = re.compile(rf"(?:.*\.(?:txt|tokens|epub|xml|jsonl|json)|.*\.xml-p\d+p\d+.*?|wiki_\d+){COMPRESSED}", re.I)
ABOUT_THE_FILES = re.compile(r"(?:readme|licen[cs]e|copying|notice|changelog)\b", re.I)

BINARY = [
    (b"%PDF", "a PDF"),
    (b"PK", "a zip archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"Rar!", "a rar archive"),
    (b"\xfd7zXZ", "an xz file"),
    (b"\xd0\xcf\x11\xe0", "an old Word document"),
    (b"\x89PNG", "a picture"),
    (b"\xff\xd8\xff", "a picture"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
    (b"{\\rtf", "an RTF document"),
]


@dataclass(frozen=True)
class InputFile:
    """``size``: bytes on disk. ``format``: one of :data:`~lazyformer_fairseq.corpus.readers.documents.FORMATS`."""

    path: str
    format: str
    size: int


def find_inputs(
    specs: Sequence[str], bad_files: Literal["stop", "skip"] = "stop", left_out: Optional[list[str]] = None
) -> list[InputFile]:
    """Input files in the order of ``specs``, those of a folder by name; of duplicates the first stays.

    Args:
        specs: ``PATH`` or ``FORMAT:PATH``, a file or a folder. A folder is searched with all its subfolders, linked
        ones too, for names that a reader recognizes; hidden files, README and licence files are left out. Without
        FORMAT it is guessed.
        bad_files: "skip" leaves out a file of a folder that is empty or is not text, and a folder that cannot be read.
        left_out: receives a line for each file of a folder that is left out: its path, and why.

    Raises:
        UserError: no such file, an empty or unreadable folder or file, an unknown format, a file that is not text, a
            file that comes twice.
    """
    files: dict[str, InputFile] = {}
    left_out = [] if left_out is None else left_out
    for spec in specs:
        wanted_format, path = parse_spec(spec)
        for file in _files(path, bad_files, left_out):
            try:
                found = InputFile(str(file), _format(file, wanted_format), file.stat().st_size)
            except UserError as error:
                if bad_files == "stop" or not path.is_dir():
                    raise
                left_out.append(str(error))
                continue
            twin = files.setdefault(os.path.realpath(file), found)
            if twin is not found:
                raise UserError(f"{file}: comes twice among the inputs, {twin.path} is the same file; name it once")
    if not files:
        raise UserError("no input: name at least one file or folder that holds text")
    return list(files.values())


def parse_spec(spec: str) -> tuple[Optional[str], Path]:
    """Format, None where it must be guessed, and path. Raises a UserError for an unknown format or a missing path."""
    prefix, colon, rest = spec.partition(":")
    if colon and prefix in FORMATS:
        wanted_format, path = prefix, Path(rest)
    elif colon and prefix.isalpha() and not Path(spec).exists():
        raise UserError(f"{spec}: unknown format {prefix!r}; choose from {', '.join(FORMATS)}")
    else:
        wanted_format, path = None, Path(spec)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: there is no such file or folder") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: is neither a file nor a folder, but a device or a pipe; write its text to a file")
    return wanted_format, path


def _files(path: Path, bad_files: str, left_out: list[str]) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    found = False
    for file in sorted(_files_below(path, bad_files, left_out)):
        if ABOUT_THE_FILES.match(file.name) or not KNOWN_NAME.fullmatch(file.name):
            left_out.append(f"{file}: its name is not one of a text that can be read")
            continue
        found = True
        yield file
    if not found:
        raise UserError(f"{path}: holds no .txt, .tokens, .epub, .xml, .jsonl, .json or wiki_00 file")


def _files_below(top: Path, bad_files: str, left_out: list[str]) -> Iterator[Path]:
    """All files but hidden ones, each folder's once, however many links lead there; names what it cannot follow."""
    seen: dict[tuple[int, int], Path] = {}
    waiting = deque([top])
    while waiting:
        folder = waiting.popleft()
        try:
            status, names = folder.stat(), os.listdir(folder)
        except OSError as error:
            problem = f"{folder}: this folder cannot be read ({error.strerror})"
            if bad_files == "stop":
                raise UserError(f"{problem}; make it readable, or leave it out with --bad-files skip") from None
            left_out.append(problem)
            continue
        first = seen.setdefault((status.st_dev, status.st_ino), folder)
        if first is not folder:
            left_out.append(f"{folder}: is a link to {first}, which is read already")
            continue
        for path in (folder / name for name in sorted(names) if not name.startswith(".")):
            if os.path.isfile(path):
                yield path
            elif os.path.isdir(path):  # links come last: what they lead to goes by its own name
                (waiting.append if path.is_symlink() else waiting.appendleft)(path)
            elif os.path.exists(path):
                left_out.append(f"{path}: is neither a file nor a folder, but a device or a pipe")
            else:
                left_out.append(f"{path}: is a link to what is not there, or cannot be read")


def _format(file: Path, wanted: Optional[str]) -> str:
    head = _head(file)
    if head is None:  # compressed, and damaged from the start: whoever reads it will report where
        return wanted or _format_of_name(file.name)
    content = head.removeprefix(BOM).lstrip()
    if not content:
        raise UserError(f"{file}: is empty")
    if content.startswith(b"PK") and (wanted or "book") == "book" and (b"epub" in head[:100] or ".epub" in file.name):
        return "book"
    for start, what in BINARY:
        if head.startswith(start):
            raise UserError(f"{file}: is no text, it looks like {what}; convert it, or leave it out")
    if b"\0" in head:
        raise UserError(f"{file}: is no text, it holds NUL bytes (UTF-16 perhaps); convert it, or leave it out")
    return wanted or _format_of_content(file, content)


def _head(file: Path) -> Optional[bytes]:
    try:
        with open_decompressed(file) as stream:
            return stream.read(HEAD_BYTES)
    except BadInput:
        return None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None


def _format_of_name(name: str) -> str:
    for part, format in {".xml": "mediawiki", ".json": "jsonl", ".epub": "book", ".tokens": "wikitext"}.items():
        if part in name:
            return format
    return "wikiextractor" if name.startswith("wiki_") else "text"


def _format_of_content(file: Path, content: bytes) -> str:
    if content.startswith(b"<doc "):
        return "wikiextractor"
    if b"<mediawiki" in content[:1000] or content.startswith(b"<page>"):
        return "mediawiki"
    if re.match(rb"<\?xml|<!DOCTYPE|<html", content, re.I):
        raise UserError(f"{file}: is XML or HTML, but no MediaWiki dump; convert it, or leave it out")
    if re.match(rb'\{\s*"', content):
        return "jsonl"
    if re.match(rb"\[\s*\{", content) and ".json" in file.name:
        raise UserError(f"{file}: is one JSON list; write one object a line (`jq -c '.[]'`)")
    if re.search(rb"(?:\A|\n\s*\n\s?)= [^=\s].* =\s*\n", content):
        return "wikitext"
    return "book" if GUTENBERG_START.search(content.decode(errors="replace")) else "text"
