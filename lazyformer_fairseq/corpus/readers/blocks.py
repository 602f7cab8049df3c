"""Divides a file into blocks of lines, one document each, for every format that marks a document's start by a line.

A range of bytes ``[start, end)`` of a file gives, whole, the blocks whose first line begins in it: so ranges that cover
a file give every block once, wherever the cuts fall.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, Optional

from lazyformer_fairseq.corpus.readers.compressed import compression, open_decompressed

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Piece:
    """The part to read in one go: a whole file, or the documents of it whose first byte lies in ``[start, end)``.

    Offsets are of the file on disk; in a bz2 file a range holds whole streams, each of which begins with a document.
    """

    path: str
    format: str
    start: int = 0
    end: Optional[int] = None


@dataclass
class Watch:
    """A reader's report while it reads.

    Attributes:
        bytes_done: bytes of the file on disk (compressed ones) consumed so far.
        lines_not_utf8: lines that were decoded as cp1252 instead.
    """

    bytes_done: int = 0
    lines_not_utf8: int = 0


class Block(NamedTuple):
    """The lines of a document, line ends included.

    Attributes:
        offset: of its first byte in the file; in the decompressed piece, if the file is compressed.
        line: number of its first line in the piece, from 1.
        is_preamble: it stands before the first start of a document in the file.
    """

    offset: int
    line: int
    content: bytes
    is_preamble: bool


# (line, whether the line before it is blank or there is none) -> whether a document starts here
StartsDocument = Callable[[bytes, bool], bool]


def read_blocks(piece: Piece, starts_document: StartsDocument, watch: Watch) -> Iterator[Block]:
    """Blocks of a piece in order; memory is bounded by the longest one.

    Raises:
        BadInput: compressed data is damaged or truncated.
    """
    is_plain = compression(piece.path) is None
    end = piece.end if is_plain else None
    offset, number, after_blank = 0, 1, True
    lines: Optional[list[bytes]] = None if piece.start else []  # None: the first lines belong to an earlier range
    first, is_preamble = (0, 1), True
    with open_decompressed(piece.path, piece.start, piece.end) as file:
        if is_plain and piece.start:
            offset, after_blank = _move_to_line(file, piece)
            number = 2  # at most one line was passed over; see `place`
        for line in file:
            length = len(line)
            if not offset and line.startswith(BOM):
                line = line[len(BOM) :]
            starts = line != b"" and starts_document(line, after_blank)
            if end is not None and offset >= end and (starts or lines is None):
                break
            if starts:
                if lines:
                    yield Block(*first, b"".join(lines), is_preamble)
                lines, first, is_preamble = [], (offset, number), False
                watch.bytes_done = file.raw.consumed
            if lines is not None:
                lines.append(line)
            after_blank = not line or line.isspace()
            offset += length
            number += 1
        if lines:
            yield Block(*first, b"".join(lines), is_preamble)
        watch.bytes_done = file.raw.consumed


def _move_to_line(file: BinaryIO, piece: Piece) -> tuple[int, bool]:
    """Reads on to the first line that begins in the range: (its offset, is the line before it blank?)."""
    with open(piece.path, "rb") as before:
        before.seek(piece.start - 1)
        offset = piece.start if before.read(1) == b"\n" else piece.start + len(file.readline())
        return offset, _is_blank_before(before, offset - 1)


def _is_blank_before(file: BinaryIO, offset: int) -> bool:
    """Whether nothing but space stands between ``offset`` and the start of its line."""
    while offset > 0:
        start = max(0, offset - 4096)
        file.seek(start)
        _, newline, end_of_line = file.read(offset - start).rpartition(b"\n")
        if not start and not newline:
            end_of_line = end_of_line.removeprefix(BOM)
        if end_of_line.strip():
            return False
        if newline:
            return True
        offset = start
    return True


def decode(content: bytes, watch: Watch) -> str:
    """UTF-8 text; any other line is read as cp1252 (old books), where bytes without meaning become U+FFFD."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "".join(_decode_line(line, watch) for line in content.splitlines(keepends=True))


def _decode_line(line: bytes, watch: Watch) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        watch.lines_not_utf8 += 1
        return line.decode("cp1252", errors="replace")


def place(piece: Piece, line: int) -> str:
    """``FILE, line N``: the place of the piece's line number ``line``, for a message."""
    if not piece.start:
        return f"{piece.path}, line {line}"
    if compression(piece.path) is not None:
        return f"{piece.path}, line {line} of what begins at byte {piece.start}"
    newlines = 0
    with open(piece.path, "rb") as file:
        left = piece.start - 1  # the range's line 2 begins after the first newline from here on
        while left and (chunk := file.read(min(left, 1 << 20))):
            newlines += chunk.count(b"\n")
            left -= len(chunk)
    return f"{piece.path}, line {newlines + line}"
