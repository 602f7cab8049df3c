"""Blocks of full sentences, masked anew in each epoch, as batches for the masked-LM criterion."""

import numpy as np
import torch
from fairseq.data import data_utils

from lazyformer_fairseq.data.datasets.masking import Masking
from lazyformer_fairseq.data.datasets.packing import Blocks, kept_blocks
from lazyformer_fairseq.data.datasets.sized import SizedDataset, collate_sources
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.files.indexed_format import read_items

# Batches are as wide as a multiple of this, if the blocks may be. Matrix units read whole eights, and full blocks end
# anywhere in the last of them: 505 to 512 tokens are one shape, to compile or to choose a kernel for, not eight.
WIDTH_MULTIPLE = 8


class FullSentencesDataset(SizedDataset):
    """Packs an indexed dataset of sentences and masks what it packs.

    Args:
        items: indexed dataset of sentences (each an array or tensor that ends in `eos`) and boundaries (`eos` alone).
        item_sizes: tokens an item.
        tokens_per_sample: longest block, see :func:`~lazyformer_fairseq.data.datasets.packing.pack_full_sentences`.
        bos, eos: ids of ``<s>`` and ``</s>``.
        masking: chooses what to mask and how.
        seed: masks and order depend on it, the epoch and the block's number alone.
        shuffle: whether batches hold blocks in random order.
        name: path of the data without its ending; blocks of much data are kept beside it.

    Raises:
        UserError: where the items are not sentences.
    """

    def __init__(
        self,
        items,
        item_sizes: np.ndarray,
        tokens_per_sample: int,
        bos: int,
        eos: int,
        masking: Masking,
        seed: int = 1,
        shuffle: bool = True,
        name: str = "data",
    ):
        if not len(items):
            raise UserError(f"{name}: holds no sentence; was the corpus empty?")
        if int(items[0][-1]) != eos:
            raise UserError(f"{name}: its first sentence does not end in </s>; preprocess it with the end symbol on")
        self.items = items
        self.item_sizes = item_sizes
        self.tokens_per_sample = tokens_per_sample
        self.blocks: Blocks = kept_blocks(name, item_sizes, tokens_per_sample)
        if not len(self.blocks):
            raise UserError(f"{name}: holds document boundaries but no sentence; was the corpus empty?")
        self.sizes = self.blocks.sizes
        self.bos = bos
        self.eos = eos
        self.masking = masking
        self.seed = seed
        self.shuffle = shuffle

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

    def __getitem__(self, index: int) -> dict:
        tokens, targets = self.masking.apply(self.block(index), self.seed, self.epoch, index)
        return {"id": index, "source": torch.from_numpy(tokens), "target": torch.from_numpy(targets)}

    def collater(self, samples: list[dict]) -> dict:
        """A batch in the shape that fairseq's trainer and masked-LM criterions expect.

        Also `masked_positions`, the places of the targets among the B * T, int64 (M,): counted here, so that nobody
        waits for a GPU to count them.
        """
        if not samples:
            return {}
        longest = max(len(sample["source"]) for sample in samples)
        time = min(longest + -longest % WIDTH_MULTIPLE, self.tokens_per_sample)
        pad = self.masking.pad_index
        target = data_utils.collate_tokens([sample["target"] for sample in samples], pad, pad_to_length=time)
        return {
            **collate_sources(samples, pad, time),
            "target": target,
            "masked_positions": target.flatten().ne(pad).nonzero().squeeze(1),
        }

    def ordered_indices(self) -> np.ndarray:
        """A new random order each epoch. Not by length: nearly all full blocks have the same length."""
        if not self.shuffle:
            return np.arange(len(self))
        return np.random.default_rng((self.seed, self.epoch)).permutation(len(self))

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """No: order and masks depend on the epoch, and a data worker that lives on would miss the next one."""
        return False

    def packing_efficiency(self, tokens_per_sample: int) -> float:
        """Share of all blocks' places that hold tokens; the rest is padding."""
        return float(self.sizes.sum() / (len(self) * tokens_per_sample))
