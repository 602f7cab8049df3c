"""Finds damage in one dataset of fairseq's memory-mapped format, PREFIX.bin and PREFIX.idx, before anything reads it.

"quick" looks at both files' ends and sizes and at :data:`SAMPLES` places in between, so that 16 GB take a second;
"full" looks at every id. The format is described in ``files/indexed_format.py``.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Optional

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import WRITE_AGAIN, Index, Prefix, read_index

How = Literal["quick", "full"]
SAMPLES = 64  # places, the first and the last item among them
ITEMS_AT_ONCE, IDS_AT_ONCE = 1 << 16, 1 << 22  # read in one go by "full"
ITEMS_OF_SAMPLE, IDS_OF_SAMPLE = 256, 1 << 16


def check_items(
    prefix: Prefix, vocab_size: Optional[int], eos: Optional[int], how: How = "quick", part: int = 0, parts: int = 1
) -> int:
    """Checks that a dataset is whole, and that its ids are those of a dictionary.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        vocab_size: symbols of the dictionary; None where it is not known.
        eos: id that every item ends in; None where any id may.
        part, parts: "full" may be shared: process `part` of `parts` reads every `parts`-th piece.

    Returns:
        How many ids the dataset holds, the last of each item not counted.

    Raises:
        UserError: a file is missing, truncated, empty, of another format, dataset or dictionary; with the file's name
            and what to do.
    """
    index = read_index(prefix)
    if not len(index.sizes):
        raise UserError(
            f"{index.path}: an empty shard, it has no item; leave it out of --data, or binarise the text again"
        )
    data = Path(f"{prefix}.bin")
    vocab_size = np.iinfo(index.dtype).max + 1 if vocab_size is None else vocab_size
    _check_start(index)
    _check_type(index, vocab_size)
    _check_size(index, data)
    ids = np.memmap(data, dtype=index.dtype, mode="r")
    pieces = _samples(index) if how == "quick" else _all_pieces(index, part, parts)
    for first, last in pieces:
        _check_piece(index, data, ids, first, last, vocab_size, eos)
    return len(ids) - len(index.sizes)


def _check_start(index: Index) -> None:
    if index.pointers[0] != 0:
        raise UserError(f"{index.path}: damaged: its first item starts at byte {index.pointers[0]:,}; {WRITE_AGAIN}")
    if len(index.sizes) > 1 and index.sizes[0] > 0:
        width = float(index.pointers[1] / index.sizes[0])
        if width in (1, 2, 4, 8) and width != index.dtype.itemsize:
            raise UserError(
                f"{index.path}: its header says {index.dtype}, but its items lie as if an id had {width:.0f} bytes; "
                f"{WRITE_AGAIN}"
            )


def _check_type(index: Index, vocab_size: int) -> None:
    largest = np.iinfo(index.dtype).max
    if vocab_size - 1 > largest:
        raise UserError(
            f"{index.path}: its ids are {index.dtype}, at most {largest:,}, but dict.txt has {vocab_size:,} symbols: "
            "one of the two is of another corpus; take both from the same folder"
        )


def _check_size(index: Index, data: Path) -> None:
    found, expected = data.stat().st_size, index.bytes
    if found == expected:
        return
    if other := _index_of_size(data, found):
        hint = f"{other} speaks of as many bytes: were files swapped? Put each beside its own"
    elif width := _other_width(index, found):
        hint = f"as many as ids of {width} bytes would take, but the index says {index.dtype}; binarise the text again"
    else:
        hint = WRITE_AGAIN
    what = "truncated" if found < expected else "too long"
    raise UserError(f"{data}: {what}: {found:,} bytes, {expected:,} by {index.path.name}; {hint}")


def _index_of_size(data: Path, size: int) -> Optional[str]:
    """Another index in the folder, or in its neighbours, that belongs to a .bin of `size` bytes."""
    for path in sorted((*data.parent.glob("*.idx"), *data.parent.parent.glob(f"shard*/{data.stem}.idx"))):
        if path != data.with_suffix(".idx"):
            try:
                if read_index(path.with_suffix("")).bytes == size:
                    return os.path.relpath(path, data.parent)
            except UserError:
                continue
    return None


def _other_width(index: Index, found: int) -> Optional[int]:
    count = index.bytes // index.dtype.itemsize
    return next((width for width in (1, 2, 4, 8) if width * count == found), None)


def _samples(index: Index) -> Iterator[tuple[int, int]]:
    """Pieces [first, last) of items, spread evenly; the last one ends with the last item."""
    items = len(index.sizes)
    starts = np.linspace(0, max(0, items - ITEMS_OF_SAMPLE), SAMPLES, dtype=np.int64)
    for start in np.unique(starts).tolist():
        yield start, _end_of_piece(index, start, ITEMS_OF_SAMPLE, IDS_OF_SAMPLE)
    yield items - 1, items


def _all_pieces(index: Index, part: int, parts: int) -> Iterator[tuple[int, int]]:
    items = len(index.sizes)
    name = os.path.join(index.path.parent.name, index.path.stem)
    with tqdm(
        total=items, desc=f"checking {name}", unit="item", unit_scale=True, disable=True if part else None
    ) as bar:
        start, number = 0, 0
        while start < items:
            end = _end_of_piece(index, start, ITEMS_AT_ONCE, IDS_AT_ONCE)
            if number % parts == part:
                yield start, end
            bar.update(end - start)
            start, number = end, number + 1


def _end_of_piece(index: Index, start: int, most_items: int, most_ids: int) -> int:
    """Takes at least one item, however long."""
    sizes = index.sizes[start : start + most_items]
    return start + max(1, int(np.searchsorted(np.cumsum(sizes, dtype=np.int64), most_ids)))


def _check_piece(
    index: Index, data: Path, ids: np.ndarray, first: int, last: int, vocab_size: int, eos: Optional[int]
) -> None:
    """Checks items [first, last), and that the item after them starts where they end."""
    sizes = index.sizes[first:last].astype(np.int64)
    if (sizes < 1).any():
        item = first + int(np.argmax(sizes < 1))
        raise UserError(f"{index.path}: item {item:,} has {index.sizes[item]} ids: damaged; {WRITE_AGAIN}")
    start, width = int(index.pointers[first]) // index.dtype.itemsize, index.dtype.itemsize
    ends = start + np.cumsum(sizes)
    followers = index.pointers[first + 1 : last + 1]
    wrong = np.concatenate(
        [index.pointers[first:last] != (ends - sizes) * width, followers != ends[: len(followers)] * width]
    )
    if wrong.any() or start < 0 or ends[-1] > len(ids):
        item = first + int(np.argmax(wrong)) % len(sizes)
        raise UserError(f"{index.path}: damaged at item {item:,}: items do not follow each other; {WRITE_AGAIN}")
    piece = ids[start : int(ends[-1])]
    beyond = (piece >= vocab_size) | (piece < 0) if index.dtype.kind == "i" else piece >= vocab_size
    if beyond.any():
        place = int(np.argmax(beyond))
        item = first + int(np.searchsorted(ends, start + place, side="right"))
        raise UserError(
            f"{data}: id {piece[place]} in item {item:,}, but dict.txt has {vocab_size:,} symbols: one of the two is "
            "of another corpus, or the file is damaged; take both from the same folder"
        )
    unended = piece[ends - 1 - start] != eos
    if eos is not None and unended.any():
        item = first + int(np.argmax(unended))
        raise UserError(
            f"{data}: item {item:,} does not end in </s>: the file is damaged or not the one that {index.path.name} "
            f"was written with, or the text was binarised without the end symbol; {WRITE_AGAIN}"
        )
