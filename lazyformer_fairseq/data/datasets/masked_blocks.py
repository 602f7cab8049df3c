"""Blocks of tokens, masked anew in each epoch, as batches for the masked-LM criterion."""

from abc import abstractmethod

import numpy as np
import torch
from fairseq.data import data_utils

from lazyformer_fairseq.data.datasets.masking import Masking
from lazyformer_fairseq.data.datasets.sized import SizedDataset, collate_sources
from lazyformer_fairseq.errors import UserError

# Batches are as wide as a multiple of this, if the blocks may be. Matrix units read whole eights, and full blocks end
# anywhere in the last of them: 505 to 512 tokens are one shape, to compile or to choose a kernel for, not eight.
WIDTH_MULTIPLE = 8


class MaskedBlocksDataset(SizedDataset):
    """The base of datasets that make blocks of an indexed dataset of sentences, and mask them.

    Args:
        items: indexed dataset of sentences (each an array or tensor that ends in `eos`) and boundaries (`eos` alone).
        item_sizes: tokens an item.
        tokens_per_sample: longest block, all tokens counted.
        bos, eos: ids of ``<s>`` and ``</s>``.
        masking: chooses what to mask and how.
        seed: all that is random depends on it, the epoch and the block's number alone.
        shuffle: whether batches hold blocks in random order.
        name: path of the data without its ending.

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
        self.bos = bos
        self.eos = eos
        self.masking = masking
        self.seed = seed
        self.shuffle = shuffle
        self.name = name

    @abstractmethod
    def block(self, index: int) -> np.ndarray:
        """Block `index` as ids (T,), before masking."""

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
        return float(self.sizes.sum(dtype=np.int64) / (len(self) * tokens_per_sample))
