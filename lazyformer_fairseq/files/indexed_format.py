"""The header of fairseq's memory-mapped format.

PREFIX.bin  the ids of all items, one after the other
PREFIX.idx  type of the ids, number of items, sizes (int32, ids of each item), pointers (int64, bytes before each)
"""

import struct

from fairseq.data.indexed_dataset import MMapIndexedDataset

MAGIC = MMapIndexedDataset.Index._HDR_MAGIC
HEADER = struct.Struct(f"<{len(MAGIC)}sQBQ")  # the format's version (1), a code for the type, the number of items
BYTES_OF_ITEM = 4 + 8
