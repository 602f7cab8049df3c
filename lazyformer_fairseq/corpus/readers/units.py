"""Divides the input into units: what one task reads, the atom of work and of resuming."""

import bz2
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import zstandard

from lazyformer_fairseq.corpus.readers.blocks import Piece, Watch, read_blocks
from lazyformer_fairseq.corpus.readers.compressed import BZ2_STREAM, BadInput, compression
from lazyformer_fairseq.corpus.readers.documents import READERS
from lazyformer_fairseq.corpus.readers.inputs import InputFile
from lazyformer_fairseq.storage.atomic import atomic_folder

DAMAGE_FILE = "damage.txt"
EXTENSIONS = {"mediawiki": "xml", "jsonl": "jsonl"}
FAILURES = 3  # after so many streams that begin inside a page, none will begin with one: a bz2 file of pbzip2, say


def plan_units(files: Sequence[InputFile], unit_bytes: int) -> list[tuple[Piece, ...]]:
    """Units of some ``unit_bytes`` on disk, in the order of ``files``: several small files, or a piece of a big one.

    They depend on the files and ``unit_bytes`` alone.
    """
    units: list[tuple[Piece, ...]] = []
    small: list[Piece] = []
    small_bytes = 0
    for file in files:
        pieces = _pieces(file, unit_bytes)
        if small and (len(pieces) > 1 or small_bytes + file.size > unit_bytes):
            units.append(tuple(small))
            small, small_bytes = [], 0
        if len(pieces) > 1:
            units += [(piece,) for piece in pieces]
        else:
            small += pieces
            small_bytes += file.size
    return [*units, tuple(small)] if small else units


def must_be_cut(file: InputFile, unit_bytes: int) -> bool:
    """Whether the file is larger than a unit, holds many documents, but can only be read from its start."""
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
    bad_files: Literal["stop", "skip"] = "stop",
    progress: Callable[[int], None] = lambda bytes_done: None,
) -> list[Path]:
    """Writes a file that :func:`must_be_cut` as parts of some ``part_bytes`` decompressed bytes, cut between documents.

    They are read as the same format. ``folder`` is made whole or not at all; if it is there it is not made again.

    Args:
        bad_files: "stop" raises :class:`BadInput` where compressed data is damaged or truncated; "skip" keeps the
        documents before the damage, and writes what is wrong to ``folder/damage.txt``.
        progress: called after each part with the bytes of ``file`` consumed so far.
    """
    if not folder.is_dir():
        with atomic_folder(folder, durable=False) as unfinished:
            _write_parts(file, unfinished, part_bytes, bad_files, progress)
    return sorted(folder.glob("part-*"))


def _write_parts(
    file: InputFile, folder: Path, part_bytes: int, bad_files: str, progress: Callable[[int], None]
) -> None:
    watch, part, left, number = Watch(), None, 0, 0
    try:
        for block in read_blocks(Piece(file.path, file.format), READERS[file.format].starts_document, watch):
            if left <= 0:
                if part:
                    part.close()
                    progress(watch.bytes_done)
                path = folder / f"part-{number:05}.{EXTENSIONS.get(file.format, 'txt')}.zst"
                part = zstandard.open(path, "wb", cctx=zstandard.ZstdCompressor(level=1))
                left, number = part_bytes, number + 1
            part.write(block.content)
            left -= len(block.content)
        progress(watch.bytes_done)
    except BadInput as error:
        if bad_files == "stop":
            raise
        (folder / DAMAGE_FILE).write_text(str(error), encoding="utf-8")
    finally:
        if part:
            part.close()


def _pieces(file: InputFile, unit_bytes: int) -> list[Piece]:
    cuts: list[int] = []
    if file.size > unit_bytes and file.format != "book":
        count = -(-file.size // unit_bytes)
        is_plain = compression(file.path) is None
        cuts = [file.size * i // count for i in range(1, count)] if is_plain else _stream_starts(file, unit_bytes)
    if not cuts:
        return [Piece(file.path, file.format)]
    return [Piece(file.path, file.format, *ends) for ends in zip([0, *cuts], [*cuts, file.size], strict=True)]


def _stream_starts(file: InputFile, unit_bytes: int) -> list[int]:
    """Offsets, some ``unit_bytes`` apart, at which a dump in many bz2 streams has one that begins with a page.

    Wikipedia's ``multistream`` dumps have this form: first a stream for the head, then one for every 100 pages.
    """
    if file.format != "mediawiki" or compression(file.path) != "bz2":
        return []
    starts: list[int] = []
    failures = 0
    with open(file.path, "rb") as dump:
        while failures < FAILURES:
            dump.seek((starts[-1] if starts else 0) + unit_bytes)
            for start in _magic_numbers(dump):
                if _begins_with_page(file.path, start):
                    starts.append(start)
                    failures = 0
                    break
                failures += 1
                if failures == FAILURES:
                    break
            else:
                break
    return starts if failures < FAILURES else []


def _magic_numbers(dump) -> Iterator[int]:
    """Offsets from the present place on at which a bz2 stream seems to start."""
    offset, buffer = dump.tell(), b""
    while chunk := dump.read(1 << 20):
        buffer += chunk
        at = buffer.find(BZ2_STREAM)
        while at >= 0:
            if at >= 4 and buffer[at - 4 : at - 1] == b"BZh":
                yield offset + at - 4
            at = buffer.find(BZ2_STREAM, at + 1)
        offset += max(0, len(buffer) - 9)
        buffer = buffer[-9:]


def _begins_with_page(path: str, start: int) -> bool:
    with open(path, "rb") as dump:
        dump.seek(start)
        stream = bz2.BZ2Decompressor()
        text = b""
        try:
            while not text and not stream.eof and (chunk := dump.read(1 << 16)):
                text = stream.decompress(chunk, max_length=1000)
        except OSError:  # the same bytes by chance
            return False
    return text.lstrip().startswith(b"<page>")


def bytes_of(unit: Sequence[Piece]) -> int:
    """Bytes on disk of a unit."""
    return sum((os.path.getsize(p.path) if p.end is None else p.end) - p.start for p in unit)
