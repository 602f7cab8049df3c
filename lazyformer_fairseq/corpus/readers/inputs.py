"""Finds the input files, detects their formats, and divides the input into units, each of which is one task's input.

Files in a folder are selected by name, and a file's format is detected from its first bytes after decompression. A
resumed run rereads only the units that were not finished.
"""

import bz2
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Literal, Optional

import zstandard

from lazyformer_fairseq.corpus.readers.files import (
    BOM,
    BZ2_STREAM,
    BadInputError,
    Piece,
    compression,
    open_decompressed,
    read_blocks,
)
from lazyformer_fairseq.corpus.readers.formats import FORMATS
from lazyformer_fairseq.corpus.wiki_words import left_out_namespaces_of
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.remote import files_at, is_url, local_copy

HEAD_BYTES = 1 << 16
DAMAGE_FILE = "damage.txt"
FAILURES = 3  # if this many streams start inside a page, as in files from pbzip2, none is assumed to start with a page
COMPRESSED = r"(?:\.(?:gz|bz2|zst))?"
KNOWN_NAME = re.compile(
    rf"(?:{'|'.join(format.names for format in FORMATS.values())}){COMPRESSED}",
    re.I,
)
ABOUT_THE_FILES = re.compile(r"(?:readme|licen[cs]e|copying|notice|changelog)\b", re.I)

BINARY = {
    "a PDF": (b"%PDF",),
    "a zip archive or an epub": (b"PK\x03\x04", b"PK\x05\x06"),
    "a 7z archive": (b"7z\xbc\xaf",),
    "a rar archive": (b"Rar!",),
    "an xz file": (b"\xfd7zXZ",),
    "an old Word document": (b"\xd0\xcf\x11\xe0",),
    "a picture": (b"\x89PNG", b"\xff\xd8\xff"),
    "UTF-16 text": (b"\xff\xfe", b"\xfe\xff"),
    "an RTF document": (b"{\\rtf",),
}


@dataclass(frozen=True)
class InputFile:
    """An input file.

    Attributes:
        path: path or URL of the file.
        format: one of :data:`~lazyformer_fairseq.corpus.readers.formats.FORMATS`.
        size: size on disk in bytes.
        first_line: for a part written by :func:`cut_file`, the number of its first line in the original file.
        left_out_namespaces: for a dump, the wiki's own names for its image, media and category namespaces; empty if the
            dump does not list them.
    """

    path: str
    format: str
    size: int
    first_line: int = 1
    left_out_namespaces: tuple[str, ...] = ()


def find_inputs(
    specs: Sequence[str],
    bad_input: Literal["stop", "skip"] = "stop",
    left_out: Optional[list[str]] = None,
) -> list[InputFile]:
    """Return the input files in ``specs`` order; files in the same folder are sorted by name.

    Args:
        specs: ``PATH`` or ``FORMAT:PATH``, where PATH is the path or URL of a file or folder. A folder and all its
            subfolders, including symlinked ones, are searched for files whose names a reader recognizes; hidden files,
            README files and licenses are skipped. Without FORMAT, the format is detected.
        bad_input: "skip" skips folders that cannot be read, and empty or non-text files that are found in a folder.
        left_out: receives a line with the path and the reason for each skipped file in a folder.

    Raises:
        UserError: a file does not exist, is not text, or occurs twice; a file or folder is empty or cannot be read; or
            a format is unknown.
    """
    files: dict[str, InputFile] = {}
    if left_out is None:
        left_out = []
    for spec in specs:
        wanted_format, path = parse_spec(spec)
        is_folder = os.path.isdir(path)
        if is_url(path):
            is_folder = files_at(path) != [path]

        candidates = [path]
        if is_folder:
            candidates = _text_files(path, bad_input, left_out)
        for file in candidates:
            try:
                found = _recognised(file, wanted_format)
            except UserError as error:
                if not is_folder:
                    raise
                if bad_input == "stop":
                    raise UserError(f"{error}; use --bad-input skip to skip such files in a folder") from None
                left_out.append(str(error))
                continue

            twin = files.setdefault(os.path.realpath(file), found)
            if twin is not found:
                raise UserError(
                    f"{file} occurs twice in the inputs ({twin.path} is the same file); list only one of them"
                )
    if not files:
        raise UserError("no input: specify at least one file or folder that contains text")
    return list(files.values())


def parse_spec(spec: str) -> tuple[Optional[str], str]:
    """Return an input's format, or None if it must be detected, and its path or URL.

    Raises:
        UserError: the format is unknown, or the path does not exist. URLs are not accessed yet.
    """
    prefix, colon, rest = spec.partition(":")
    may_name_format = colon != "" and prefix.isalpha() and not rest.startswith("//")
    if colon and prefix in FORMATS:
        wanted_format = prefix
        place = rest
    elif may_name_format and not Path(spec).exists():
        raise UserError(
            f"{spec}: unknown format {prefix!r}; choose from {', '.join(FORMATS)}{nearest(prefix, FORMATS)}"
        )
    else:
        wanted_format = None
        place = spec
    if is_url(place):
        return wanted_format, place.rstrip("/")
    path = Path(place)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file or folder") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is neither a file nor a folder, but a device or a pipe; write its text to a file")
    return wanted_format, str(path)


def _text_files(folder: str, bad_input: str, left_out: list[str]) -> list[str]:
    """Return the files in a folder that are named like text files, in order."""
    if is_url(folder):
        below = [file for file in files_at(folder) if "/." not in file.removeprefix(folder)]
    else:
        below = list(map(str, _files_below(Path(folder), bad_input, left_out)))
    found = []
    for file in sorted(below, key=lambda file: file.split("/")):
        name = os.path.basename(file)
        if ABOUT_THE_FILES.match(name) or not KNOWN_NAME.fullmatch(name):
            left_out.append(f"{file}: not named like a supported text file")
        else:
            found.append(file)
    if not found:
        raise UserError(
            f"{folder} contains no file that is named like a text file: .txt, .text, .raw, .md, .rst, .tokens, "
            ".train, .valid, .test, .xml, .jsonl, .ndjson, .json, .parquet or wiki_00; to read a file with a different "
            "name, pass its path"
        )
    return found


def _files_below(top: Path, bad_input: str, left_out: list[str]) -> Iterator[Path]:
    """Yield all files below a folder except hidden ones; a folder with several links to it is read only once.

    For each folder that cannot be read and each link that cannot be followed, a line is appended to `left_out`.
    """
    seen: dict[tuple[int, int], Path] = {}
    waiting = deque([top])
    while waiting:
        folder = waiting.popleft()
        try:
            status = folder.stat()
            names = os.listdir(folder)
        except OSError as error:
            problem = f"{folder}: this folder cannot be read ({error.strerror})"
            if bad_input == "stop":
                raise UserError(f"{problem}; make it readable, or skip it with --bad-input skip") from None
            left_out.append(problem)
            continue
        first = seen.setdefault((status.st_dev, status.st_ino), folder)
        if first is not folder:
            left_out.append(f"{folder}: a link to {first}, which has already been read")
            continue

        paths = [folder / name for name in sorted(names) if not name.startswith(".")]
        for path in paths:
            if os.path.isfile(path):
                yield path
            elif os.path.isdir(path) and path.is_symlink():
                waiting.append(path)  # links are followed last, so that a folder is found under its own name
            elif os.path.isdir(path):
                waiting.appendleft(path)
            elif os.path.exists(path):
                left_out.append(f"{path}: neither a file nor a folder, but a device or a pipe")
            else:
                left_out.append(f"{path}: a link to a target that does not exist or cannot be read")


def _recognised(file: str, wanted: Optional[str]) -> InputFile:
    """Return a file with its format: the requested one or, if that is None, the detected one."""
    try:
        size = os.path.getsize(local_copy(file))
        with open_decompressed(file) as stream:
            head = stream.read(HEAD_BYTES)
    except BadInputError:  # a compressed file that is damaged from the start; the reader will report where
        file_name = os.path.basename(file)
        by_name = (name for name, format in FORMATS.items() if re.match(format.names, file_name))
        return InputFile(file, wanted or next(by_name, "text"), size)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    for name, format in FORMATS.items():
        if format.magic and head.startswith(format.magic):
            if compression(file) is not None:
                raise UserError(f"{file} is a compressed {name} file, which is not supported; decompress it")
            return InputFile(file, name, size)
        if format.magic and name == wanted:
            raise UserError(f"{file} is not a {name} file; omit the prefix {name}: or use a different file")
    content = head.removeprefix(BOM).lstrip()
    if not content:
        raise UserError(f"{file} is empty")
    for what, starts in BINARY.items():
        if head.startswith(starts):
            raise UserError(f"{file} is not text, but looks like {what}; convert it, or exclude it")
    if b"\0" in head:
        raise UserError(f"{file} is not text: it contains NUL bytes (perhaps UTF-16); convert it, or exclude it")

    recognised = (name for name, format in FORMATS.items() if format.recognises(content, file))
    found = wanted or next(recognised)
    namespaces = ()
    if found == "mediawiki":
        namespaces = left_out_namespaces_of(head)
    return InputFile(file, found, size, left_out_namespaces=namespaces)


def plan_units(files: Sequence[InputFile], unit_bytes: int) -> list[tuple[Piece, ...]]:
    """Divide files into units of about ``unit_bytes`` on disk, in file order.

    A unit consists of several small files or a piece of a large one. The division depends only on the files and
    ``unit_bytes``.
    """
    units: list[list[Piece]] = []
    room = 0  # in the last unit
    for file in files:
        pieces = _pieces(file, unit_bytes)
        if len(pieces) == 1 and file.size <= room:
            units[-1] += pieces
            room -= file.size
        else:
            units += [[piece] for piece in pieces]
            room = 0
            if len(pieces) == 1:
                room = unit_bytes - file.size
    return list(map(tuple, units))


def must_be_cut(file: InputFile, unit_bytes: int) -> bool:
    """Return whether a file is larger than a unit and contains many documents, but can only be read from the start."""
    return (
        file.size > unit_bytes
        and file.format != "book"
        and compression(file.path) is not None
        and not _stream_starts(file, unit_bytes)
    )


def cut_file(
    file: InputFile,
    folder: Path,
    part_bytes: int,
    bad_input: Literal["stop", "skip"] = "stop",
) -> list[Path]:
    """Cut a file (see :func:`must_be_cut`) into parts at document boundaries, and return their paths.

    The parts have the file's format and are called ``part-NUMBER.LINE.zst``, where LINE is the number of the part's
    first line in the file. ``folder`` is written atomically; if it already exists, it is not changed.

    Args:
        file: the file to cut.
        folder: receives the parts.
        part_bytes: approximate size of a part, in decompressed bytes.
        bad_input: "stop" raises a :class:`BadInputError` if the compressed data is damaged or truncated; "skip" keeps
            the documents before the damage, and describes the damage in ``folder/damage.txt``.
    """
    if not folder.is_dir():
        with atomic_folder(folder, durable=False) as unfinished:
            try:
                _write_parts(file, unfinished, part_bytes)
            except BadInputError as error:
                if bad_input == "stop":
                    raise
                (unfinished / DAMAGE_FILE).write_text(str(error), encoding="utf-8")
    return sorted(folder.glob("part-*"))


def _write_parts(file: InputFile, folder: Path, part_bytes: int) -> None:
    starts_document = FORMATS[file.format].starts_document
    left = 0
    with ExitStack() as opened:
        for block in read_blocks(Piece(file.path, file.format), starts_document):
            if left <= 0:
                opened.close()
                number = len(list(folder.iterdir()))
                path = folder / f"part-{number:05}.{block.line}.zst"
                compressor = zstandard.ZstdCompressor(level=1)
                part = opened.enter_context(zstandard.open(path, "wb", cctx=compressor))
                left = part_bytes
            part.write(block.content)
            left -= len(block.content)


def _pieces(file: InputFile, unit_bytes: int) -> list[Piece]:
    whole = Piece(file.path, file.format, first_line=file.first_line, left_out_namespaces=file.left_out_namespaces)
    if is_url(file.path):
        whole = replace(whole, end=file.size)  # so that the size need not be requested from the URL
    cuts: list[int] = []
    if file.size > unit_bytes and file.format != "book":
        count = -(-file.size // unit_bytes)
        cuts = [file.size * i // count for i in range(1, count)]
        if compression(file.path):
            cuts = _stream_starts(file, unit_bytes)
    if not cuts:
        return [whole]
    ranges = pairwise([0, *cuts, file.size])
    return [replace(whole, start=start, end=end) for start, end in ranges]


def _stream_starts(file: InputFile, unit_bytes: int) -> list[int]:
    """Return offsets, about ``unit_bytes`` apart, at which a bz2 stream of a dump starts with a page.

    Wikipedia's ``multistream`` dumps have such streams: the first contains the header, and each of the others contains
    100 pages. For any other file, the list is empty.
    """
    if file.format != "mediawiki" or compression(file.path) != "bz2":
        return []
    starts: list[int] = []
    failures = 0
    with open(local_copy(file.path), "rb") as dump:
        while True:
            last_start = starts[-1] if starts else 0
            dump.seek(last_start + unit_bytes)
            for start in _magic_numbers(dump):
                if _begins_with_page(file.path, start):
                    break
                failures += 1
                if failures == FAILURES:
                    return []
            else:
                return starts
            starts.append(start)
            failures = 0


def _magic_numbers(dump: BinaryIO) -> Iterator[int]:
    """Yield the offsets from the current position onward at which a bz2 stream appears to start."""
    offset = dump.tell()
    buffer = b""
    while chunk := dump.read(1 << 20):
        buffer += chunk
        for found in re.finditer(b"BZh." + re.escape(BZ2_STREAM), buffer, re.DOTALL):
            yield offset + found.start()
        offset += max(0, len(buffer) - 9)
        buffer = buffer[-9:]


def _begins_with_page(path: str, start: int) -> bool:
    with open(local_copy(path), "rb") as dump:
        dump.seek(start)
        stream = bz2.BZ2Decompressor()
        text = b""
        try:
            while not text and not stream.eof and (chunk := dump.read(1 << 16)):
                text = stream.decompress(chunk, max_length=1000)
        except OSError:  # the bytes looked like the start of a stream by chance
            return False
    return text.lstrip().startswith(b"<page>")
