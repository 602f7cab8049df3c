"""Plain, gz, bz2 and zst files, which are all read in the same way, and their blocks of lines, one document each.

The compression is recognised from a file's first bytes, not from its name. A file may contain several streams, one
after the other (bgzip, pbzip2, Wikipedia's multistream dumps, concatenated zst frames). Python's own readers silently
accept a truncated zst file, so this module has its own.

In every format, a line marks the start of a document. Reading a range of bytes ``[start, end)`` of a file yields the
blocks whose first line begins in the range, each of them whole. So ranges that cover a file yield every block once,
wherever the cuts are.
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

# The number of bytes that are decompressed at once and, for bz2, the largest number that may come out at once. Both are
# small, because a damaged chunk yields nothing, and because 1 KiB of zst can expand to 32 MB and 50 bytes of bz2 to
# 46 MB.
CHUNK = 1 << 10
MOST_AT_ONCE = 1 << 16
# How many times its size a file may expand to, and the number of bytes up to which it may expand at any ratio.
# Compression shrinks text to a third, a table to a thirtieth, and a decompression bomb to a millionth. The whole file
# may be one document, of which the steps make about ten copies.
MOST_TIMES = 50
BEYOND_BYTES = 1 << 24
MOST_WINDOW = 1 << 27  # bytes of a zst file's window; the largest that `zstd` accepts without --long
BZ2_STREAM = b"1AY&SY"  # follows `BZh` and a digit at the start of a bz2 stream
BZ2_END = b"\x17\x72\x45\x38\x50\x90"  # takes its place in an empty stream
STARTS = {"gz": b"\x1f\x8b\x08", "zst": b"\x28\xb5\x2f\xfd"}
DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gz": lambda: zlib.decompressobj(wbits=31),
    "bz2": bz2.BZ2Decompressor,
    "zst": lambda: zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW).decompressobj(),
}


class BadInputError(UserError):
    """A broken record, or a file whose compressed data is damaged; the message names the file, the place and why."""


def compression(path: Union[str, Path]) -> Optional[str]:
    """Return ``gz``, ``bz2`` or ``zst`` for a compressed file, or None for any other."""
    with open(local_copy(path), "rb") as file:
        head = file.read(10)
    if head.startswith(b"BZh") and head[4:] in (BZ2_STREAM, BZ2_END):
        return "bz2"
    return next((name for name, start in STARTS.items() if head.startswith(start)), None)


def open_decompressed(path: Union[str, Path], start: int = 0, end: Optional[int] = None) -> io.BufferedReader:
    """Open a file from ``start`` on; of a compressed file, the decompressed streams that begin in ``[start, end)``.

    If the file is not compressed, ``end`` is ignored: to finish a document, its lines must be read beyond it.
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
    """The decompressed bytes of those streams of a compressed file that begin in ``[start, end)``.

    Raises:
        BadInputError: a stream is damaged or truncated, or expands to far more bytes than text would.
    """

    def __init__(self, file: BinaryIO, path: str, compressed_by: str, start: int, end: Optional[int]):
        self._file = file
        self._path = path
        self._compressed_by = compressed_by
        self._start = start
        self._end = end
        self._at = start  # place of the next compressed byte to decompress
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
                    self._fail("is truncated, so the file is incomplete")
            if self._stream is None:
                if self._end is not None and self._at >= self._end:
                    return 0
                chunk = self._chunk.lstrip(b"\0")  # some tools pad the last block with zeros
                self._at += len(self._chunk) - len(chunk)
                self._chunk = chunk
            if self._chunk or self._holds_input():
                self._ready = memoryview(self._decompress())
                self._unpacked += len(self._ready)
                if self._unpacked > max(BEYOND_BYTES, MOST_TIMES * (self._at - self._start)):
                    self._fail(f"expands to more than {MOST_TIMES} times its size, which text never does")
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _holds_input(self) -> bool:
        """Return whether the decompressor has more output for its previous input, as only bz2's can have."""
        return not getattr(self._stream, "needs_input", True)

    def _decompress(self) -> bytes:
        most = ()
        if self._compressed_by == "bz2":
            most = (MOST_AT_ONCE,)
        try:
            self._stream = self._stream or DECOMPRESSORS[self._compressed_by]()
            text = self._stream.decompress(self._chunk, *most)
        except (OSError, zlib.error, zstandard.ZstdError, EOFError) as error:
            self._fail(f"is damaged ({error})")
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
            f"{self._path}, byte {self._at}: the {self._compressed_by} data {what}; get a new copy, or leave it out"
        ) from None


BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Piece:
    """A part of the input that is read in one go: a file, or its documents whose first byte is in ``[start, end)``.

    Offsets are those in the file on disk. In a bz2 file, a range has whole streams, each of which begins with a
    document.
    """

    path: str
    format: str
    start: int = 0
    end: Optional[int] = None
    first_line: int = 1
    """Number of the first line in the original file, if the file was cut from another one."""
    left_out_namespaces: tuple[str, ...] = ()
    """For a dump: its wiki's names of the namespaces of pictures, media and categories."""


@dataclass
class Watch:
    """A reader's report: the number of ``lines_not_utf8``, which were decoded as cp1252 instead."""

    lines_not_utf8: int = 0


class Block(NamedTuple):
    """The lines of a document, with their line ends.

    Attributes:
        offset: place of its first byte in the file or, if the file is compressed, in the decompressed piece.
        line: number of its first line in the piece, counted from 1.
        content: the lines.
        is_preamble: whether the lines come before the first start of a document in the file.
    """

    offset: int
    line: int
    content: bytes
    is_preamble: bool


StartsDocument = Callable[[bytes, bool], bool]
Parsed = Iterator[Union[tuple[str, dict[str, Any]], BadInputError]]


@dataclass(frozen=True)
class Format:
    """A row of the table of formats (``formats.py``): how to recognise a format, and how to find its documents.

    Attributes:
        document: what a document is in this format, for messages.
        names: a regular expression for the names of its files, without the ending of a compressed file.
        recognises: returns whether a file has this format, from its first bytes (without leading space) and its path;
            raises a UserError for a file that is similar but cannot be read.
        starts_document: returns whether a document starts with a line, from the line and whether the line before it is
            blank or missing.
        parse: yields (text, metadata) for each document in a block, and a BadInputError in place of a broken one.
        read_whole: yields the same for a piece; it replaces these two if documents are not made of lines.
        magic: the first bytes of a file, if the format is not text.
        is_selected: whether people selected the text line by line, so that no line or document is dropped for its
            looks.
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
    """Yield the blocks of a piece in order; memory is bounded by the longest block.

    Raises:
        BadInputError: the compressed data is damaged or truncated.
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
            number = 2  # line 1 is the one that was skipped, if any; see `place`
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
    """Move to the first line that begins in the range; return its offset, and whether the line before it is blank."""
    with open(local_copy(piece.path), "rb") as before:
        before.seek(piece.start - 1)
        offset = piece.start
        if before.read(1) != b"\n":
            offset = piece.start + len(file.readline())
        return offset, _is_blank_before(before, offset - 1)


def _is_blank_before(file: BinaryIO, offset: int) -> bool:
    """Return whether there is only space between the start of a line and ``offset`` in it."""
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
    """Decode UTF-8; decode a line that is not UTF-8 as cp1252 (old books), with U+FFFD for undefined bytes."""
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
    """Return ``FILE, line N`` for a message, given the number of a line in a piece."""
    if not piece.start:
        return f"{piece.path}, line {piece.first_line - 1 + line}"
    if compression(piece.path) is not None:
        return f"{piece.path}, line {line} of the part that begins at byte {piece.start}"
    newlines = 0
    with open(local_copy(piece.path), "rb") as file:
        left = piece.start - 1  # line 2 of the range begins after the first newline from here on
        while left and (chunk := file.read(min(left, 1 << 20))):
            newlines += chunk.count(b"\n")
            left -= len(chunk)
    return f"{piece.path}, line {newlines + line}"


def bytes_of(unit: Sequence[Piece]) -> int:
    """Return the size of a unit on disk, in bytes."""
    return sum((os.path.getsize(local_copy(p.path)) if p.end is None else p.end) - p.start for p in unit)
