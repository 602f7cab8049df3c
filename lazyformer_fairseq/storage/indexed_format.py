"""Reads, writes, joins and checks datasets in fairseq's memory-mapped format, with vectorized code.

PREFIX.bin  concatenated ids of all items
PREFIX.idx  type of the ids, number of items, sizes (int32, ids per item), pointers (int64, bytes before each item)

:func:`check_items` detects damage before a dataset is read. A "quick" check covers the ends and sizes of both files and
:data:`SAMPLES` positions in between, which takes a second for 16 GB. A "full" check covers every id.
"""

import mmap
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Optional, Union

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.atomic import atomic_file

# Copied from fairseq.data.indexed_dataset, which takes seconds to import; a test compares the two.
MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = (
    np.uint8,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.float64,
    np.double,
    np.uint16,
    np.uint32,
    np.uint64,
)
TYPES = dict(enumerate(_DTYPES, 1))
HEADER = struct.Struct(f"<{len(MAGIC)}sQBQ")  # format version (1), code of the type, number of items
BYTES_OF_ITEM = 4 + 8
WRITE_AGAIN = "copy or binarize both files again"
Prefix = Union[str, Path]
Dtype = Union[type, np.dtype]
How = Literal["quick", "full"]
SAMPLES = 64  # number of positions, including the first and the last item
# Chunk sizes of "full" checks, followed by those of "quick" checks.
ITEMS_AT_ONCE = 1 << 16
IDS_AT_ONCE = 1 << 22
ITEMS_OF_SAMPLE = 256
IDS_OF_SAMPLE = 1 << 16


def type_of_ids(symbols: int) -> type:
    """Return fairseq's storage type for the ids of a dictionary with this many symbols."""
    if symbols < 65_500:
        return np.uint16
    return np.uint32


@dataclass(frozen=True)
class Index:
    """The contents of an .idx file: dtype of the ids, ids per item (items,), and bytes before each item (items,)."""

    path: Path
    dtype: np.dtype
    sizes: np.ndarray
    pointers: np.ndarray

    @property
    def bytes(self) -> int:
        """Size of the .bin file in bytes, according to the last item."""
        if not len(self.sizes):
            return 0
        start_of_last = int(self.pointers[-1])
        size_of_last = int(self.sizes[-1]) * self.dtype.itemsize
        return start_of_last + size_of_last

    def check_data(self) -> Path:
        """Return the path of the .bin file; raise a UserError if its size does not match the index."""
        path = self.path.with_suffix(".bin")
        found = path.stat().st_size
        if found != self.bytes:
            how = "too long"
            if found < self.bytes:
                how = "truncated"
            raise UserError(
                f"{path} is {how}: it has {found:,} bytes, but should have {self.bytes:,} according to "
                f"{self.path.name}; copy or binarize both files again, and keep matching files together"
            )
        return path


def read_index(prefix: Prefix) -> Index:
    """Read the header of ``PREFIX.idx`` and memory-map the rest; the index may be empty.

    Raises:
        UserError: one of the two files is missing, or the index is damaged or has an unsupported format.
    """
    path = Path(f"{prefix}.idx")
    data = Path(f"{prefix}.bin")
    for file, other in ((data, path), (path, data)):
        if not file.is_file():
            beside = ""
            if other.is_file():
                beside = f", although {other.name} exists"
            raise UserError(f"{file}: no such file{beside}; is --data the folder of binarized data?")

    with path.open("rb") as stream:
        header = stream.read(HEADER.size).ljust(HEADER.size, b"\0")
    magic, version, code, items = HEADER.unpack(header)
    found = path.stat().st_size
    if (magic, version) != (MAGIC, 1):
        raise UserError(
            f"{path}: not an index in fairseq's mmap format, or its header is damaged; binarize the text again"
        )
    if found != (expected := HEADER.size + items * BYTES_OF_ITEM):
        problem = "truncated" if found < expected else "too long"
        bytes_found = f"it has {found:,} bytes, but needs {expected:,} for the {items:,} items in its header"
        raise UserError(f"{path} is {problem}: {bytes_found}; {WRITE_AGAIN}")
    dtype = np.dtype(TYPES.get(code, np.void))
    if dtype.kind not in "iu":
        raise UserError(f"{path}: the ids have type {code}, which is not an integer type; binarize the text again")

    if not items:
        return Index(path, dtype, np.empty(0, np.int32), np.empty(0, np.int64))
    sizes = np.memmap(path, np.int32, mode="r", offset=HEADER.size, shape=(items,))
    pointers = np.memmap(path, np.int64, mode="r", offset=HEADER.size + sizes.nbytes, shape=(items,))
    return Index(path, dtype, sizes, pointers)


class MappedItems(Sequence):
    """A memory-mapped sequence of a dataset's items, each an array of ids; processes share the memory.

    The corresponding class in fairseq reads the whole file before use. This one lets the operating system prefetch the
    file in the background.

    Attributes:
        sizes: number of ids per item, (items,).
        ids: concatenated ids of all items.

    Raises:
        UserError: see :func:`read_index`.
    """

    def __init__(self, prefix: Prefix):
        self._prefix = prefix
        self._index = read_index(prefix)
        self.sizes = self._index.sizes
        self.ids = np.empty(0, self._index.dtype)
        if self._index.bytes:
            self.ids = np.memmap(f"{prefix}.bin", self._index.dtype, "r")
            self.ids._mmap.madvise(mmap.MADV_WILLNEED)  # type: ignore[attr-defined] # numpy has no public name

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, item: int) -> np.ndarray:  # type: ignore[override] # no slices
        return self.read(item, item)

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the concatenated ids of items `first` to `last` (inclusive), without copying."""
        start = int(self._index.pointers[first]) // self._index.dtype.itemsize
        length = int(self.sizes[first : last + 1].sum())
        return np.asarray(self.ids[start : start + length])

    def __reduce__(self) -> tuple:
        return MappedItems, (self._prefix,)


def read_items(items: Any, first: int, last: int) -> np.ndarray:
    """Return the concatenated ids of items `first` to `last` (inclusive) of a dataset in any format.

    Formats other than :class:`MappedItems` are read item by item, which takes longer than all other processing.
    """
    if isinstance(items, MappedItems):
        return items.read(first, last)
    return np.concatenate([items[item].numpy() for item in range(first, last + 1)])


def write_items(
    prefix: Prefix,
    dtype: Dtype,
    blocks: Iterable[tuple[np.ndarray, np.ndarray]],
    durable: bool = True,
) -> None:
    """Write ``PREFIX.bin`` and ``PREFIX.idx`` atomically.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        dtype: numpy type of the ids in the file.
        blocks: chunks of any number of items, each as the concatenated ids and the number of ids per item.
        durable: see :func:`~lazyformer_fairseq.storage.atomic.atomic_file`.
    """
    all_sizes = []
    with (
        atomic_file(f"{prefix}.idx", durable) as index,
        atomic_file(f"{prefix}.bin", durable) as data,
    ):
        for ids, sizes in blocks:
            ids.astype(dtype, copy=False).tofile(data)
            all_sizes.append(sizes)
        write_index(index, lambda: all_sizes, dtype)


def join_parts(parts: Sequence[Prefix], target: Prefix) -> None:
    """Concatenate datasets into ``target.bin`` and ``target.idx``, which are written atomically.

    Args:
        parts: prefixes of one or more datasets, in order.
        target: prefix of the dataset to write.

    Raises:
        UserError: the files of a part do not match, or parts have different types of ids.
    """
    dtype = read_index(parts[0]).dtype
    for part in parts:
        index = read_index(part)
        if index.dtype != dtype:
            raise UserError(f"{index.path}: the ids are {index.dtype}, but the ids of the other parts are {dtype}")
        index.check_data()
    with (
        atomic_file(f"{target}.idx") as index_file,
        atomic_file(f"{target}.bin") as data,
    ):
        for part in parts:
            with open(f"{part}.bin", "rb") as source:
                shutil.copyfileobj(source, data, 1 << 20)
        # This reads the parts' indexes three times, because the sentence sizes of a shard may not fit into memory.
        write_index(index_file, lambda: (read_index(part).sizes for part in parts), dtype)


def write_index(stream: BinaryIO, read_sizes: Callable[[], Iterable[np.ndarray]], dtype: Dtype) -> None:
    """Write an index in fairseq's format.

    Args:
        stream: the file to write to.
        read_sizes: function that yields the item sizes in arrays of any length; it is called three times.
        dtype: numpy type of the ids.
    """
    dtype = np.dtype(dtype)
    code = next(code for code, known in TYPES.items() if dtype == known)
    items = sum(len(sizes) for sizes in read_sizes())
    stream.write(HEADER.pack(MAGIC, 1, code, items))

    for sizes in read_sizes():
        sizes.astype(np.int32).tofile(stream)

    before = 0
    for sizes in read_sizes():
        item_bytes = sizes.astype(np.int64) * dtype.itemsize
        ends = before + np.cumsum(item_bytes)
        (ends - item_bytes).tofile(stream)
        if len(ends):
            before = ends[-1]


def check_items(
    prefix: Prefix,
    vocab_size: Optional[int],
    eos: Optional[int],
    how: How = "quick",
    part: int = 0,
    parts: int = 1,
) -> int:
    """Check that a dataset is complete and that its ids are valid for a dictionary.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        vocab_size: number of symbols in the dictionary; None if unknown.
        eos: id at the end of every item; None to skip this check.
        how: "quick" or "full".
        part: index of this process.
        parts: number of processes that share a "full" check; each reads every `parts`-th chunk.

    Returns:
        The number of ids in the dataset, excluding the last id of each item.

    Raises:
        UserError: a file is missing, truncated or empty, has an unsupported format, or does not match the other file
            or the dictionary; the message names the file and says what to do.
    """
    index = read_index(prefix)
    if not len(index.sizes):
        raise UserError(f"{index.path}: the shard is empty; remove the shard from --data, or binarize its text again")
    largest = np.iinfo(index.dtype).max
    if vocab_size is None:
        vocab_size = largest + 1
    if index.pointers[0] != 0:
        raise UserError(f"{index.path} is damaged: the first item starts at byte {index.pointers[0]:,}; {WRITE_AGAIN}")
    if vocab_size - 1 > largest:
        raise UserError(
            f"{index.path}: the ids are {index.dtype} (at most {largest:,}), but dict.txt has {vocab_size:,} symbols: "
            "one of the two files is from a different corpus; use both from the same folder"
        )
    ids = np.memmap(index.check_data(), dtype=index.dtype, mode="r")
    if how == "quick":
        pieces = _samples(index)
    else:
        pieces = _all_pieces(index, part, parts)
    for piece in pieces:
        _check_piece(index, ids, piece, vocab_size, eos)
    return len(ids) - len(index.sizes)


def _samples(index: Index) -> Iterator[tuple[int, int]]:
    """Yield evenly spaced ranges [first, last) of items, including the last item."""
    items = len(index.sizes)
    starts = np.linspace(0, max(0, items - ITEMS_OF_SAMPLE), SAMPLES, dtype=np.int64)
    for start in np.unique(starts).tolist():
        yield start, _end_of_piece(index, start, ITEMS_OF_SAMPLE, IDS_OF_SAMPLE)
    yield items - 1, items


def _all_pieces(index: Index, part: int, parts: int) -> Iterator[tuple[int, int]]:
    items = len(index.sizes)
    end = 0
    number = 0
    name = f"checking {index.path.parent.name}/{index.path.stem}"
    with Progress(total=items, desc=name, unit="item", unit_scale=True, disable=bool(part)) as bar:
        while end < items:
            start = end
            end = _end_of_piece(index, end, ITEMS_AT_ONCE, IDS_AT_ONCE)
            if number % parts == part:
                yield start, end
            bar.update(end - start)
            number += 1


def _end_of_piece(index: Index, start: int, most_items: int, most_ids: int) -> int:
    """Return the end of the longest range from item `start` within the limits; it always contains that item."""
    sizes = index.sizes[start : start + most_items]
    cumulative_ids = np.cumsum(sizes, dtype=np.int64)
    items_within = int(np.searchsorted(cumulative_ids, most_ids))
    return start + max(1, items_within)


def _check_piece(
    index: Index,
    ids: np.ndarray,
    piece_of_items: tuple[int, int],
    vocab_size: int,
    eos: Optional[int],
) -> None:
    """Check the items in [first, last), and that the next item starts where the last of them ends."""
    first, last = piece_of_items
    data = index.path.with_suffix(".bin")
    sizes = index.sizes[first:last].astype(np.int64)
    if (sizes < 1).any():
        item = first + int(np.argmax(sizes < 1))
        raise UserError(f"{index.path} is damaged: item {item:,} has {index.sizes[item]} ids; {WRITE_AGAIN}")

    start = int(index.pointers[first]) // index.dtype.itemsize
    width = index.dtype.itemsize
    ends = start + np.cumsum(sizes)
    after = index.pointers[first + 1 : last + 1]
    wrong = np.concatenate(
        [
            index.pointers[first:last] != (ends - sizes) * width,
            after != ends[: len(after)] * width,
        ]
    )
    if wrong.any() or start < 0 or ends[-1] > len(ids):
        item = first + int(np.argmax(wrong)) % len(sizes)
        raise UserError(f"{index.path} is damaged at item {item:,}: items are not contiguous; {WRITE_AGAIN}")

    piece = ids[start : int(ends[-1])]
    if index.dtype.kind == "i":
        beyond = (piece >= vocab_size) | (piece < 0)
    else:
        beyond = piece >= vocab_size
    if beyond.any():
        place = int(np.argmax(beyond))
        item = first + int(np.searchsorted(ends, start + place, side="right"))
        raise UserError(
            f"{data}: item {item:,} contains id {piece[place]}, but dict.txt has {vocab_size:,} symbols: one of the "
            "two files is damaged or from a different corpus; use both from the same folder"
        )

    unended = piece[ends - 1 - start] != eos
    if eos is not None and unended.any():
        item = first + int(np.argmax(unended))
        raise UserError(
            f"{data}: item {item:,} does not end in </s>: the file is damaged, does not match {index.path.name}, "
            f"or was binarized without the end symbol; {WRITE_AGAIN}"
        )
