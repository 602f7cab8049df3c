"""Blocks of full sentences, masked anew in each epoch, as batches for the masked-LM criterion."""

import numpy as np
import torch
from fairseq.data import data_utils
from torch import Tensor

from lazyformer_fairseq.data.masking import Masking
from lazyformer_fairseq.data.packing import Blocks, pack_full_sentences
from lazyformer_fairseq.data.sized_dataset import SizedDataset
from lazyformer_fairseq.errors import UserError


class FullSentencesDataset(SizedDataset):
    """Packs an indexed dataset of sentences and masks what it packs.

    Args:
        items: indexed dataset of sentences (each a LongTensor that ends in `eos`) and boundaries (`eos` alone).
        item_sizes: tokens an item.
        tokens_per_sample: longest block, see :func:`lazyformer_fairseq.data.packing.pack_full_sentences`.
        bos, eos: ids of ``<s>`` and ``</s>``.
        masking: what is masked and how.
        seed: masks and order are functions of it, the epoch and the block's number alone.
        shuffle: whether batches hold blocks in random order.
        name: for messages, the path of the data.

    Raises:
        UserError: where the items are no sentences.
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
        self.blocks: Blocks = pack_full_sentences(item_sizes, tokens_per_sample)
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
        parts = [self.items[item].numpy() for item in range(first, last + 1)]
        parts = [
            part for number, part in enumerate(parts) if len(part) > 1 or number == 0 or len(parts[number - 1]) > 1
        ]  # of several boundaries in a row, one
        # In this order: first and last may be the same item, and its end counts from its start.
        parts[-1] = parts[-1][: blocks.last_end[index]]
        parts[0] = parts[0][blocks.first_offset[index] :]
        if parts[-1][-1] != self.eos:
            parts.append(np.array([self.eos]))
        return np.concatenate([np.array([self.bos]), *parts])

    def __getitem__(self, index: int) -> dict:
        tokens, targets = self.masking.apply(self.block(index), self.seed, self.epoch, index)
        return {"id": index, "source": torch.from_numpy(tokens), "target": torch.from_numpy(targets)}

    def collater(self, samples: list[dict]) -> dict:
        """A batch in the shape that fairseq's trainer and masked-LM criterions expect."""
        if not samples:
            return {}
        lengths = torch.tensor([len(sample["source"]) for sample in samples])

        def pad(key: str) -> Tensor:
            return data_utils.collate_tokens([sample[key] for sample in samples], self.masking.pad_index)

        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": int(lengths.sum()),
            "net_input": {
                "src_tokens": pad("source"),
                "src_lengths": lengths,
                "has_padding": bool((lengths != lengths[0]).any()),
            },
            "target": pad("target"),
        }

    def ordered_indices(self) -> np.ndarray:
        """Another random order each epoch. Not by length: full blocks are nearly all of the same."""
        if not self.shuffle:
            return np.arange(len(self))
        return np.random.default_rng((self.seed, self.epoch)).permutation(len(self))

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """No: order and masks depend on the epoch, and a data worker that lives on would not hear of the next one."""
        return False

    def packing_efficiency(self, tokens_per_sample: int) -> float:
        """Share of the places of all blocks that hold tokens, the rest being padding."""
        return float(self.sizes.sum() / (len(self) * tokens_per_sample))
