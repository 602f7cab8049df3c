"""Opens plain, gz, bz2 and zst files alike, and counts how much of the file on disk is consumed.

The file's first bytes decide which it is, not its name. A file may hold several streams, one after the other (bgzip,
pbzip2, Wikipedia's multistream dumps, concatenated zst frames). Python's own readers silently accept a truncated zst
file and count no compressed bytes, hence this one.
"""

import bz2
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Optional, Union

import zstandard

from lazyformer_fairseq.errors import UserError

CHUNK = {"gz": 1 << 16, "bz2": 1 << 16, "zst": 1 << 12}  # read at once; 4 KiB of zst can stand for 128 MiB
MOST_AT_ONCE = 1 << 24  # bytes of text; 50 bytes of bz2 can stand for 46 MB
# Text shrinks to a third, a bomb to a millionth. Below the second number any file may do as it likes.
MOST_TIMES, BEYOND_BYTES = 200, 1 << 28
BZ2_STREAM = b"1AY&SY"  # after `BZh` and a digit: the first block of a bz2 stream
BZ2_END = b"\x17\x72\x45\x38\x50\x90"  # the same place in a stream of nothing
DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gz": lambda: zlib.decompressobj(wbits=31),
    "bz2": bz2.BZ2Decompressor,
    "zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


class BadInput(UserError):
    """A file that cannot be read to its end; the message names the file, the place and the reason."""


def compression(path: Union[str, Path]) -> Optional[str]:
    """``gz``, ``bz2``, ``zst``, or None for a file that is not compressed."""
    with open(path, "rb") as file:
        head = file.read(10)
    if head.startswith(b"\x1f\x8b\x08"):
        return "gz"
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return "zst"
    if head.startswith(b"BZh") and head[4:] in (BZ2_STREAM, BZ2_END):
        return "bz2"
    return None


def open_decompressed(path: Union[str, Path], start: int = 0, end: Optional[int] = None) -> io.BufferedReader:
    """The bytes of the streams of a compressed file that begin in ``[start, end)`` of it; ``.raw`` counts (see below).

    Ignores ``end`` for a file that is not compressed: whoever reads lines goes beyond it to finish a document.
    """
    kind = compression(path)
    file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by the reader
    file.seek(start)
    raw = _Plain(file, start) if kind is None else _Decompressed(file, str(path), kind, start, end)
    return io.BufferedReader(raw, 1 << 18)


class _Plain(io.RawIOBase):
    """A file as it is. ``consumed``: bytes of it read so far."""

    def __init__(self, file: BinaryIO, start: int):
        self._file, self._start = file, start

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        return self._file.readinto(buffer)

    @property
    def consumed(self) -> int:
        return self._file.tell() - self._start

    def close(self) -> None:
        self._file.close()
        super().close()


class _Decompressed(_Plain):
    """The streams of a compressed file that begin before ``end``. ``consumed``: compressed bytes read so far.

    Raises:
        BadInput: a stream is damaged, stops before its end, or stands for far more bytes than text would.
    """

    def __init__(self, file: BinaryIO, path: str, kind: str, start: int, end: Optional[int]):
        super().__init__(file, start)
        self._path, self._kind = path, kind
        self._end = end
        self._at = start  # of the next compressed byte to hand to the decompressor
        self._chunk = b""
        self._stream: Any = None  # None between two streams
        self._ready = memoryview(b"")
        self._unpacked = 0

    def readinto(self, buffer) -> int:
        while not self._ready:
            if not self._chunk and not self._holds_input():
                self._chunk = self._file.read(CHUNK[self._kind])
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
        """Whether the decompressor has more output for the input it was given; only bz2's ever has."""
        return not getattr(self._stream, "needs_input", True)

    def _decompress(self) -> bytes:
        most = (MOST_AT_ONCE,) if self._kind == "bz2" else ()
        try:
            self._stream = self._stream or DECOMPRESSORS[self._kind]()
            text = self._stream.decompress(self._chunk, *most)
        except (OSError, zlib.error, zstandard.ZstdError, EOFError) as error:
            self._fail(f"are damaged ({error})")
        left = self._stream.unused_data if self._stream.eof else b""
        self._at += len(self._chunk) - len(left)
        self._chunk = left
        if self._stream.eof:
            self._stream = None
        return text

    def _fail(self, what: str) -> None:
        raise BadInput(
            f"{self._path}, byte {self._at}: its {self._kind} data {what}; get it again, or leave it out"
        ) from None
