"""A common reader for plain, gz, bz2 and zst files, which divides them into blocks of lines, one block per document.

Compression is detected from a file's first bytes, not from its name. A file may contain several concatenated streams
(bgzip, pbzip2, Wikipedia's multistream dumps, zst frames). The zstandard package's reader silently accepts a truncated
file, so this module has its own.

In every format that is read by lines, a line marks the start of a document. Reading a byte range ``[start, end)`` of a
file yields the blocks whose first line starts in the range, each of them in full. Consecutive ranges that cover a file
therefore yield every block exactly once, wherever the cuts are.
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

# The number of bytes to decompress at once and, for bz2, the maximum number of bytes to produce at once. Both are
# small, because a damaged chunk yields nothing, and because 1 KiB of zst can expand to 32 MB and 50 bytes of bz2 to
# 46 MB.
CHUNK = 1 << 10
MOST_AT_ONCE = 1 << 16
# The maximum expansion ratio of a compressed file, and the number of bytes up to which any ratio is allowed. Text
# expands about 3 times, a table 30 times, and a decompression bomb a million times. The whole file may be a single
# document, and the steps make about ten copies of it.
MOST_TIMES = 50
BEYOND_BYTES = 1 << 24
MOST_WINDOW = 1 << 27  # bytes of a zst file's window; the largest that `zstd` accepts without --long
BZ2_STREAM = b"1AY&SY"  # follows `BZh` and a digit at the start of a bz2 stream
BZ2_END = b"\x17\x72\x45\x38\x50\x90"  # takes the place of BZ2_STREAM in an empty stream
STARTS = {"gz": b"\x1f\x8b\x08", "zst": b"\x28\xb5\x2f\xfd"}
DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gz": lambda: zlib.decompressobj(wbits=31),
    "bz2": bz2.BZ2Decompressor,
    "zst": lambda: zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW).decompressobj(),
}


class BadInputError(UserError):
    """An error for a broken record or damaged compressed data; the message gives the location and the reason."""


def compression(path: Union[str, Path]) -> Optional[str]:
    """Return a file's compression: ``gz``, ``bz2``, ``zst`` or None."""
    with open(local_copy(path), "rb") as file:
        head = file.read(10)
    if head.startswith(b"BZh") and head[4:] in (BZ2_STREAM, BZ2_END):
        return "bz2"
    return next((name for name, start in STARTS.items() if head.startswith(start)), None)


def open_decompressed(path: Union[str, Path], start: int = 0, end: Optional[int] = None) -> io.BufferedReader:
    """Open a file at ``start``; if it is compressed, decompress the streams that begin in ``[start, end)``.

    If the file is not compressed, ``end`` is ignored, because the last document may extend beyond it.
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
    """A raw file with the decompressed content of all compressed streams that begin in ``[start, end)``.

    Raises:
        BadInputError: a stream is damaged or truncated, or expands to far more bytes than text would.
    """

    def __init__(self, file: BinaryIO, path: str, compressed_by: str, start: int, end: Optional[int]):
        self._file = file
        self._path = path
        self._compressed_by = compressed_by
        self._start = start
        self._end = end
        self._at = start  # offset of the next byte to decompress
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
        """Return whether the decompressor still has output from earlier input, which is possible only for bz2."""
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
            f"{self._path}, byte {self._at}: the {self._compressed_by} data {what}; get a new copy, or exclude the file"
        ) from None


BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Piece:
    """A part of the input that is read in one pass: a file, or the documents that start in a range of it.

    The range is ``[start, end)``, in bytes of the file on disk. In a bz2 file, a range consists of whole streams, each
    of which starts with a document.
    """

    path: str
    format: str
    start: int = 0
    end: Optional[int] = None
    first_line: int = 1
    """For a file that was cut from a larger one, the number of its first line in the larger file."""
    left_out_namespaces: tuple[str, ...] = ()
    """For a dump: the wiki's own names for its image, media and category namespaces."""


@dataclass
class Watch:
    """Statistics from a reader: the number of lines that were not UTF-8 and were decoded as cp1252 instead."""

    lines_not_utf8: int = 0


class Block(NamedTuple):
    """The lines of a document, including line ends.

    Attributes:
        offset: offset of the block's first byte in the file or, if the file is compressed, in the decompressed piece.
        line: number of the block's first line in the piece, counted from 1.
        content: the lines.
        is_preamble: whether the lines precede the first document in the file.
    """

    offset: int
    line: int
    content: bytes
    is_preamble: bool


StartsDocument = Callable[[bytes, bool], bool]
Parsed = Iterator[Union[tuple[str, dict[str, Any]], BadInputError]]


@dataclass(frozen=True)
class Format:
    """An input format (a row in ``formats.py``): how to recognize it, and how to find and parse its documents.

    Attributes:
        document: description of a document in this format, for messages.
        names: regular expression for file names, not including the suffix that denotes compression.
        recognises: returns whether a file has this format, given its first bytes (without leading space) and its path;
            raises a UserError for a file that is similar but cannot be read.
        starts_document: returns whether a line starts a document, given the line and whether the previous line is blank
            or missing.
        parse: yields (text, metadata) for each document in a block, and a BadInputError in place of a broken one.
        read_whole: yields the same for a whole piece; it replaces `starts_document` and `parse` if documents do not
            consist of lines.
        magic: the first bytes of a file, if the format is not text.
        is_selected: whether the text was selected by hand, line by line; no line or document is then dropped
            because of its appearance.
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
    """Seek to the first line that starts in the range; return its offset and whether the previous line is blank."""
    with open(local_copy(piece.path), "rb") as before:
        before.seek(piece.start - 1)
        offset = piece.start
        if before.read(1) != b"\n":
            offset = piece.start + len(file.readline())
        return offset, _is_blank_before(before, offset - 1)


def _is_blank_before(file: BinaryIO, offset: int) -> bool:
    """Return whether the line that contains ``offset`` has only whitespace before it."""
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
    """Decode UTF-8, falling back to cp1252 (old books) for lines that are not UTF-8; undefined bytes become U+FFFD."""
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
    """Return a line's location ``FILE, line N`` for messages, given the number of the line in its piece."""
    if not piece.start:
        return f"{piece.path}, line {piece.first_line - 1 + line}"
    if compression(piece.path) is not None:
        return f"{piece.path}, line {line} of the part that begins at byte {piece.start}"
    newlines = 0
    with open(local_copy(piece.path), "rb") as file:
        left = piece.start - 1  # line 2 of the range starts after the first newline from here on
        while left and (chunk := file.read(min(left, 1 << 20))):
            newlines += chunk.count(b"\n")
            left -= len(chunk)
    return f"{piece.path}, line {newlines + line}"


def bytes_of(unit: Sequence[Piece]) -> int:
    """Return a unit's size on disk, in bytes."""
    total = 0
    for piece in unit:
        end = piece.end
        if end is None:
            end = os.path.getsize(local_copy(piece.path))
        total += end - piece.start
    return total
