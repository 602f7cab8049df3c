"""Reads neighbouring items of an indexed dataset at once."""

import numpy as np
from fairseq.data.indexed_dataset import MMapIndexedDataset


def read_items(items, sizes: np.ndarray, first: int, last: int) -> np.ndarray:
    """The tokens of items `first` to `last`, both included, one item after the other.

    fairseq's own format holds them so, and a block of sentences is one piece of the file. Read item by item, as other
    formats are, it takes longer than all else that is done to the block.

    Args:
        items: indexed dataset.
        sizes: tokens of each of all its items.
    """
    if isinstance(items, MMapIndexedDataset):
        index = items._index
        count = int(sizes[first : last + 1].sum())
        return np.frombuffer(items._bin_buffer, index.dtype, count, offset=int(index._pointers[first]))
    return np.concatenate([items[item].numpy() for item in range(first, last + 1)])
