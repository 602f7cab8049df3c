"""fairseq's memory-mapped format: reads and writes its index, and joins datasets, without Python for every item.

PREFIX.bin  the ids of all items, one after the other
PREFIX.idx  type of the ids, number of items, sizes (int32, ids of each item), pointers (int64, bytes before each)
"""

import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Union

import numpy as np
from fairseq.data.indexed_dataset import MMapIndexedDataset, _code_to_dtype, _dtype_header_code

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.files.whole import rewritten_file

MAGIC = MMapIndexedDataset.Index._HDR_MAGIC
HEADER = struct.Struct(f"<{len(MAGIC)}sQBQ")  # the format's version (1), a code for the type, the number of items
BYTES_OF_ITEM = 4 + 8
Prefix = Union[str, Path]


def join_parts(parts: Sequence[Prefix], target: Prefix) -> None:
    """Writes ``target.bin`` and ``target.idx``, each whole or not at all: the bytes of one dataset written at once.

    Args:
        parts: prefixes of at least one dataset; the items come in their order.

    Raises:
        UserError: a part's files do not belong together, or not to the other parts.
    """
    dtype, _ = read_index(parts[0])
    for part in parts:
        _check_part(part, dtype)
    with rewritten_file(Path(f"{target}.idx")) as index, rewritten_file(Path(f"{target}.bin")) as data:
        with open(data, "wb") as stream:
            for part in parts:
                with open(f"{part}.bin", "rb") as source:
                    shutil.copyfileobj(source, stream, 1 << 20)
        # Two passes over the parts' indexes: the sizes of a shard's sentences need not fit into memory.
        write_index(index, lambda: (read_index(part)[1] for part in parts), dtype)


def write_index(path: Path, read_sizes: Callable[[], Iterable[np.ndarray]], dtype: type) -> None:
    """Writes an index as fairseq does.

    Args:
        read_sizes: gives the sizes of the items, in arrays of any lengths; called three times.
        dtype: numpy's type of the ids.
    """
    with open(path, "wb") as stream:
        stream.write(HEADER.pack(MAGIC, 1, _dtype_header_code(dtype), sum(map(len, read_sizes()))))
        for sizes in read_sizes():
            sizes.astype(np.int32).tofile(stream)
        for pointers in _pointers(read_sizes(), np.dtype(dtype).itemsize):
            pointers.tofile(stream)


def _pointers(arrays: Iterable[np.ndarray], item_size: int) -> Iterator[np.ndarray]:
    """int64: bytes before each item."""
    before = 0
    for sizes in arrays:
        ends = before + np.cumsum(sizes, dtype=np.int64) * item_size
        yield ends - sizes.astype(np.int64) * item_size
        before = ends[-1] if len(ends) else before


def read_index(prefix: Prefix) -> tuple[type, np.ndarray]:
    """numpy's type of the ids, and the sizes of the items: int32 (items,).

    Raises:
        UserError: the file is not such an index, or not whole.
    """
    path = Path(f"{prefix}.idx")
    with open(path, "rb") as stream:
        content = stream.read(HEADER.size)
        magic, version, code, items = HEADER.unpack(content.ljust(HEADER.size, b"\0"))
        if (magic, version) != (MAGIC, 1) or path.stat().st_size != HEADER.size + items * BYTES_OF_ITEM:
            raise UserError(f"{path}: not an index of fairseq's, or not whole; write it again")
        return _code_to_dtype[code], np.fromfile(stream, dtype=np.int32, count=items)


def _check_part(prefix: Prefix, dtype: type) -> None:
    own_dtype, sizes = read_index(prefix)
    if own_dtype != dtype:
        raise UserError(f"{prefix}.idx: its ids are {own_dtype.__name__}, those of the other parts {dtype.__name__}")
    expected = int(sizes.sum(dtype=np.int64)) * np.dtype(dtype).itemsize
    if (found := os.path.getsize(f"{prefix}.bin")) != expected:
        raise UserError(f"{prefix}.bin: {found} bytes, but its index speaks of {expected}; write the part again")
