"""Blocks of full sentences, masked anew in each epoch."""

import numpy as np

from lazyformer_fairseq.data.datasets.masked_blocks import MaskedBlocksDataset
from lazyformer_fairseq.data.datasets.packing import Blocks, kept_blocks
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import read_items


class FullSentencesDataset(MaskedBlocksDataset):
    """Packs an indexed dataset of sentences and masks what it packs.

    Arguments as for :class:`MaskedBlocksDataset`; for blocks see
    :func:`~lazyformer_fairseq.data.datasets.packing.pack_full_sentences`. Those of much data are kept beside it.

    Raises:
        UserError: where the items are not sentences.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.blocks: Blocks = kept_blocks(self.name, self.item_sizes, self.tokens_per_sample)
        if not len(self.blocks):
            raise UserError(f"{self.name}: holds document boundaries but no sentence; was the corpus empty?")
        self.sizes = self.blocks.sizes

    def block(self, index: int) -> np.ndarray:
        """Block `index` as ids (T,), before masking."""
        blocks = self.blocks
        first, last = int(blocks.first_item[index]), int(blocks.last_item[index])
        tokens, sizes = read_items(self.items, first, last), self.item_sizes[first : last + 1]
        repeated = np.flatnonzero((sizes[1:] == 1) & (sizes[:-1] == 1)) + 1
        if len(repeated):  # one of several boundaries in a row
            tokens = np.delete(tokens, np.cumsum(sizes)[repeated] - 1)
        start, end = int(blocks.first_offset[index]), len(tokens) - int(sizes[-1]) + int(blocks.last_end[index])
        block = np.full(self.sizes[index], self.eos)  # which closes a cut sentence; any other brings its own
        block[0] = self.bos
        block[1 : 1 + end - start] = tokens[start:end]
        return block
