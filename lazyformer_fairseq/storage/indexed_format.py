"""fairseq's memory-mapped format: reads and writes its index, and joins datasets, without Python for every item.

PREFIX.bin  the ids of all items, one after the other
PREFIX.idx  type of the ids, number of items, sizes (int32, ids of each item), pointers (int64, bytes before each)
"""

import mmap
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Union

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import atomic_file

# As in fairseq.data.indexed_dataset, which takes seconds to import; a test compares them.
MAGIC = b"MMIDIDX\x00\x00"
TYPES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.double,
    8: np.uint16,
    9: np.uint32,
    10: np.uint64,
}
HEADER = struct.Struct(f"<{len(MAGIC)}sQBQ")  # the format's version (1), a code for the type, the number of items
BYTES_OF_ITEM = 4 + 8
WRITE_AGAIN = "copy or binarise both files again"
Prefix = Union[str, Path]
Dtype = Union[type, np.dtype]


def type_of_ids(symbols: int) -> type:
    """The type in which fairseq stores ids of a dictionary of so many symbols: the first that holds them."""
    return np.uint16 if symbols < 65_500 else np.uint32


@dataclass(frozen=True)
class Index:
    """The contents of an .idx: numpy's type of the ids, ids of each item (items,), bytes before each item (items,)."""

    path: Path
    dtype: np.dtype
    sizes: np.ndarray
    pointers: np.ndarray

    @property
    def bytes(self) -> int:
        """Size of the .bin, by the last item."""
        return int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if len(self.sizes) else 0


def read_index(prefix: Prefix) -> Index:
    """Reads the header of ``PREFIX.idx`` and maps the rest; there may be no item.

    Raises:
        UserError: one of the two files is missing; the index is not one, or not whole.
    """
    path, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for file, other in ((data, path), (path, data)):
        if not file.is_file():
            beside = f", though {other.name} is there" if other.is_file() else ""
            raise UserError(f"{file}: no such file{beside}; does --data name the folder of binarised data?")
    with path.open("rb") as stream:
        magic, version, code, items = HEADER.unpack(stream.read(HEADER.size).ljust(HEADER.size, b"\0"))
    found = path.stat().st_size
    if (magic, version) != (MAGIC, 1):
        raise UserError(f"{path}: no index of fairseq's mmap format, or its start is damaged; binarise the text again")
    if found != (expected := HEADER.size + items * BYTES_OF_ITEM):
        what = "truncated" if found < expected else "too long"
        raise UserError(
            f"{path}: {what}: {found:,} bytes, {expected:,} for the {items:,} items of its header; {WRITE_AGAIN}"
        )
    dtype = np.dtype(TYPES.get(code, np.void))
    if dtype.kind not in "iu":
        raise UserError(f"{path}: its ids are of type {code}, which is no integer; binarise the text again")
    if not items:
        return Index(path, dtype, np.empty(0, np.int32), np.empty(0, np.int64))
    sizes = np.memmap(path, np.int32, "r", HEADER.size, (items,))
    pointers = np.memmap(path, np.int64, "r", HEADER.size + sizes.nbytes, (items,))
    return Index(path, dtype, sizes, pointers)


class MappedItems(Sequence):
    """The items of a dataset on disk, each an array of ids; all processes share the memory.

    fairseq's own class reads the whole file through before it is used. This one asks for it, and does not wait.

    Attributes:
        sizes: ids of each item, (items,).

    Raises:
        UserError: see :func:`read_index`.
    """

    def __init__(self, prefix: Prefix):
        self._prefix = prefix
        self._index = read_index(prefix)
        self.sizes = self._index.sizes
        self._ids = np.empty(0, self._index.dtype)
        if self._index.bytes:
            self._ids = np.memmap(f"{prefix}.bin", self._index.dtype, "r")
            self._ids._mmap.madvise(mmap.MADV_WILLNEED)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, item: int) -> np.ndarray:
        return self.read(item, item)

    def read(self, first: int, last: int) -> np.ndarray:
        """The ids of items `first` to `last`, both included, one item after the other, as they lie in the file."""
        start = int(self._index.pointers[first]) // self._index.dtype.itemsize
        return np.asarray(self._ids[start : start + int(self.sizes[first : last + 1].sum())])

    def __reduce__(self):
        return MappedItems, (self._prefix,)


def read_items(items, first: int, last: int) -> np.ndarray:
    """The ids of items `first` to `last` of a dataset of any format, both included, one item after the other.

    Reading item by item, as other formats than fairseq's own need, takes longer than everything else done to a block.
    """
    if isinstance(items, MappedItems):
        return items.read(first, last)
    return np.concatenate([items[item].numpy() for item in range(first, last + 1)])


def write_items(
    prefix: Prefix, dtype: Dtype, blocks: Iterable[tuple[np.ndarray, np.ndarray]], durable: bool = True
) -> None:
    """Writes ``PREFIX.bin`` and ``PREFIX.idx``, each whole or not at all.

    Args:
        dtype: numpy's type of the ids in the file.
        blocks: of any number of items: their ids, one item after the other, and the number of ids of each.
        durable: see :func:`~lazyformer_fairseq.storage.atomic.atomic_file`.
    """
    all_sizes = []
    with atomic_file(f"{prefix}.idx", durable) as index, atomic_file(f"{prefix}.bin", durable) as data:
        for ids, sizes in blocks:
            ids.astype(dtype, copy=False).tofile(data)
            all_sizes.append(sizes)
        write_index(index, lambda: all_sizes, dtype)


def join_parts(parts: Sequence[Prefix], target: Prefix) -> None:
    """Writes ``target.bin`` and ``target.idx``, each whole or not at all: the same bytes as one dataset written whole.

    Args:
        parts: prefixes of at least one dataset; the items come in their order.

    Raises:
        UserError: a part's files do not match each other, or the other parts.
    """
    dtype = read_index(parts[0]).dtype
    for part in parts:
        _check_part(part, dtype)
    with atomic_file(f"{target}.idx") as index, atomic_file(f"{target}.bin") as data:
        for part in parts:
            with open(f"{part}.bin", "rb") as source:
                shutil.copyfileobj(source, data, 1 << 20)
        # Three passes over the parts' indexes: the sizes of a shard's sentences need not fit into memory.
        write_index(index, lambda: (read_index(part).sizes for part in parts), dtype)


def _check_part(prefix: Prefix, dtype: np.dtype) -> None:
    index = read_index(prefix)
    if index.dtype != dtype:
        raise UserError(f"{index.path}: its ids are {index.dtype}, those of the other parts {dtype}")
    expected = int(index.sizes.sum(dtype=np.int64)) * dtype.itemsize
    if (found := Path(f"{prefix}.bin").stat().st_size) != expected:
        raise UserError(f"{prefix}.bin: {found} bytes, but its index speaks of {expected}; write the part again")


def write_index(stream: BinaryIO, read_sizes: Callable[[], Iterable[np.ndarray]], dtype: Dtype) -> None:
    """Writes an index as fairseq does.

    Args:
        read_sizes: gives the sizes of the items, in arrays of any lengths; called three times.
        dtype: numpy's type of the ids.
    """
    dtype = np.dtype(dtype)
    stream.write(HEADER.pack(MAGIC, 1, _code_of(dtype), sum(map(len, read_sizes()))))
    for sizes in read_sizes():
        sizes.astype(np.int32).tofile(stream)
    for pointers in _pointers(read_sizes(), dtype.itemsize):
        pointers.tofile(stream)


def _code_of(dtype: np.dtype) -> int:
    return next(code for code, type_ in TYPES.items() if dtype == type_)


def _pointers(arrays: Iterable[np.ndarray], item_size: int) -> Iterator[np.ndarray]:
    """int64: bytes before each item."""
    before = 0
    for sizes in arrays:
        ends = before + np.cumsum(sizes, dtype=np.int64) * item_size
        yield ends - sizes.astype(np.int64) * item_size
        before = ends[-1] if len(ends) else before
