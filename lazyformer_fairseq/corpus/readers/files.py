"""Opens plain, gz, bz2 and zst files alike, and divides them into blocks of lines, one document each.

The file's first bytes decide which it is, not its name. A file may hold several streams, one after the other (bgzip,
pbzip2, Wikipedia's multistream dumps, concatenated zst frames). Python's own readers silently
accept a truncated zst file, hence this one.

A format marks a document's start by a line. A range of bytes ``[start, end)`` of a file gives, whole, the blocks whose
first line begins in it: so ranges that cover a file give every block once, wherever the cuts fall.
"""

import bz2
import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Optional, Union

import zstandard

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.remote import local_copy

# Bytes that go to the decompressor at once, and for bz2 that come out. What it has made of them is lost where they are
# damaged; and 1 KiB of zst can stand for 32 MB, 50 bytes of bz2 for 46 MB.
CHUNK = 1 << 10
MOST_AT_ONCE = 1 << 16
# Text shrinks to a third, a table to a thirtieth, a bomb to a millionth. Below the second number any file may do as it
# likes. The whole may be one document, of which reading makes some ten copies.
MOST_TIMES = 50
BEYOND_BYTES = 1 << 24
MOST_WINDOW = 1 << 27  # bytes that a zst file may have its reader keep; what `zstd` reads without --long
BZ2_STREAM = b"1AY&SY"  # after `BZh` and a digit: the first block of a bz2 stream
BZ2_END = b"\x17\x72\x45\x38\x50\x90"  # the same place in a stream of nothing
STARTS = {"gz": b"\x1f\x8b\x08", "zst": b"\x28\xb5\x2f\xfd"}
DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gz": lambda: zlib.decompressobj(wbits=31),
    "bz2": bz2.BZ2Decompressor,
    "zst": lambda: zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW).decompressobj(),
}


class BadInputError(UserError):
    """A record that is broken, or a file whose compressed data is damaged; the message names file, place and reason."""


def compression(path: Union[str, Path]) -> Optional[str]:
    """Return ``gz``, ``bz2``, ``zst``, or None for a file that is not compressed."""
    with open(local_copy(path), "rb") as file:
        head = file.read(10)
    if head.startswith(b"BZh") and head[4:] in (BZ2_STREAM, BZ2_END):
        return "bz2"
    return next((name for name, start in STARTS.items() if head.startswith(start)), None)


def open_decompressed(path: Union[str, Path], start: int = 0, end: Optional[int] = None) -> io.BufferedReader:
    """Return the bytes of the streams of a compressed file that begin in ``[start, end)`` of it.

    Ignores ``end`` for a file that is not compressed: whoever reads lines goes beyond it to finish a document.
    """
    compressed_by = compression(path)
    buffering = 0
    if compressed_by is None:
        buffering = 1 << 18
    file = open(local_copy(path), "rb", buffering)  # noqa: SIM115  closed by the reader
    file.seek(start)
    if compressed_by is None:
        return file
    return io.BufferedReader(_Decompressed(file, str(path), compressed_by, start, end), 1 << 18)


class _Decompressed(io.RawIOBase):
    """The streams of a compressed file that begin before ``end``.

    Raises:
        BadInputError: a stream is damaged, stops before its end, or stands for far more bytes than text would.
    """

    def __init__(self, file: BinaryIO, path: str, compressed_by: str, start: int, end: Optional[int]):
        self._file = file
        self._path = path
        self._compressed_by = compressed_by
        self._start = start
        self._end = end
        self._at = start  # of the next compressed byte to hand to the decompressor
        self._chunk = b""
        self._stream: Any = None  # None between two streams
        self._ready = memoryview(b"")
        self._unpacked = 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer) -> int:
        while not self._ready:
            if not self._chunk and not self._holds_input():
                self._chunk = self._file.read(CHUNK)
                if not self._chunk and self._stream is None:
                    return 0
                if not self._chunk:
                    self._fail("stop in the middle, so the file is not whole")
            if self._stream is None:
                if self._end is not None and self._at >= self._end:
                    return 0
                chunk = self._chunk.lstrip(b"\0")  # some tools fill up the last block with zeros
                self._at += len(self._chunk) - len(chunk)
                self._chunk = chunk
            if self._chunk or self._holds_input():
                self._ready = memoryview(self._decompress())
                self._unpacked += len(self._ready)
                if self._unpacked > max(BEYOND_BYTES, MOST_TIMES * (self._at - self._start)):
                    self._fail(f"unpack to more than {MOST_TIMES} times their size, which no text does")
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _holds_input(self) -> bool:
        """Return whether the decompressor has more output for the input it was given; only bz2's ever has."""
        return not getattr(self._stream, "needs_input", True)

    def _decompress(self) -> bytes:
        most = ()
        if self._compressed_by == "bz2":
            most = (MOST_AT_ONCE,)
        try:
            self._stream = self._stream or DECOMPRESSORS[self._compressed_by]()
            text = self._stream.decompress(self._chunk, *most)
        except (OSError, zlib.error, zstandard.ZstdError, EOFError) as error:
            self._fail(f"are damaged ({error})")
        left = b""
        if self._stream.eof:
            left = self._stream.unused_data
        self._at += len(self._chunk) - len(left)
        self._chunk = left
        if self._stream.eof:
            self._stream = None
        return text

    def _fail(self, what: str) -> None:
        raise BadInputError(
            f"{self._path}, byte {self._at}: its {self._compressed_by} data {what}; get it again, or leave it out"
        ) from None


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
    first_line: int = 1
    """The number of its first line, where the file is a part of another one."""
    left_out_namespaces: tuple[str, ...] = ()
    """Of a dump, its wiki's names for pictures, media and categories."""


@dataclass
class Watch:
    """A reader's report: ``lines_not_utf8`` were decoded as cp1252 instead."""

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


StartsDocument = Callable[[bytes, bool], bool]
Parsed = Iterator[Union[tuple[str, dict[str, Any]], BadInputError]]


@dataclass(frozen=True)
class Format:
    """A row of the table of formats (``formats.py``): how a format is recognised, and its documents are found.

    Attributes:
        document: what a document of it is, in messages.
        names: a regular expression of its files' names, without the ending of a compressed one.
        recognises: whether a file is of this format, by its first bytes, without space before them, and its path; a
            UserError for what is near to it, but cannot be read.
        starts_document: whether one starts with a line: (line, whether the one before it is blank or there is none).
        parse: (text, metadata) of the documents in a block, and a BadInputError in the place of each that is broken.
        read_whole: in place of these two, where documents are not lines of a file: the same of a piece.
        magic: the bytes that a file of it begins with, if it is no text.
        is_selected: whether people chose its text line by line, so that no line or document is dropped for its looks.
    """

    document: str
    names: str
    recognises: Callable[[bytes, str], bool]
    starts_document: Optional[StartsDocument] = None
    parse: Optional[Callable[[Block, Piece, Watch], Parsed]] = None
    read_whole: Optional[Callable[[Piece, Watch], Parsed]] = None
    magic: bytes = b""
    is_selected: bool = False


def read_blocks(piece: Piece, starts_document: StartsDocument) -> Iterator[Block]:
    """Return blocks of a piece in order; memory is bounded by the longest one.

    Raises:
        BadInputError: compressed data is damaged or truncated.
    """
    is_plain = compression(piece.path) is None
    end = None
    if is_plain:
        end = piece.end
    offset = 0
    number = 1
    after_blank = True
    lines: Optional[list[bytes]] = None if piece.start else []  # None: the first lines belong to an earlier range
    first = (0, 1)
    is_preamble = True
    with open_decompressed(piece.path, piece.start, piece.end) as file:
        if is_plain and piece.start:
            offset, after_blank = _move_to_line(file, piece)
            number = 2  # at most one line was passed over; see `place`
        for read in file:
            line = read
            if not offset:
                line = read.removeprefix(BOM)
            starts = line != b"" and starts_document(line, after_blank)
            if end is not None and offset >= end and (starts or lines is None):
                break
            if starts:
                if lines:
                    yield Block(*first, b"".join(lines), is_preamble)
                lines = []
                first = (offset, number)
                is_preamble = False
            if lines is not None:
                lines.append(line)
            after_blank = not line or line.isspace()
            offset += len(read)
            number += 1
        if lines:
            yield Block(*first, b"".join(lines), is_preamble)


def _move_to_line(file: BinaryIO, piece: Piece) -> tuple[int, bool]:
    """Read on to the first line that begins in the range: (its offset, is the line before it blank?)."""
    with open(local_copy(piece.path), "rb") as before:
        before.seek(piece.start - 1)
        offset = piece.start
        if before.read(1) != b"\n":
            offset = piece.start + len(file.readline())
        return offset, _is_blank_before(before, offset - 1)


def _is_blank_before(file: BinaryIO, offset: int) -> bool:
    """Return whether nothing but space stands between ``offset`` and the start of its line."""
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
    """Decode UTF-8; any other line is read as cp1252 (old books), where bytes without meaning become U+FFFD."""
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
    """Return ``FILE, line N``, the place of the piece's line number ``line``, for a message."""
    if not piece.start:
        return f"{piece.path}, line {piece.first_line - 1 + line}"
    if compression(piece.path) is not None:
        return f"{piece.path}, line {line} of what begins at byte {piece.start}"
    newlines = 0
    with open(local_copy(piece.path), "rb") as file:
        left = piece.start - 1  # the range's line 2 begins after the first newline from here on
        while left and (chunk := file.read(min(left, 1 << 20))):
            newlines += chunk.count(b"\n")
            left -= len(chunk)
    return f"{piece.path}, line {newlines + line}"


def bytes_of(unit: Sequence[Piece]) -> int:
    """Return bytes on disk of a unit."""
    return sum((os.path.getsize(local_copy(p.path)) if p.end is None else p.end) - p.start for p in unit)
