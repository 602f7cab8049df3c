"""Blocks of tokens, masked anew in each epoch, as batches for the masked-LM criterion.

Full sentences are packed into blocks; other tasks bring whole inputs. BERT's masking: 15% of the tokens are to be
predicted; 80% of these become <mask>, 10% another word, 10% stay.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from fairseq.data import data_utils

from lazyformer_fairseq.data.datasets.packing import Blocks, kept_blocks
from lazyformer_fairseq.data.datasets.sized import SizedDataset, by_jittered_length, collate_sources
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import read_items


@dataclass(frozen=True)
class Masking:
    """Chooses what to mask and how; UserError for impossible shares.

    Attributes:
        vocab_size: V; replacements are drawn from all of it but `special`.
        mask_index, pad_index: ids of ``<mask>`` and ``<pad>``.
        special: ids never masked and never drawn: ``<s> <pad> </s> <unk> <mask>``.
        probability: share of the other tokens to predict.
        keep: share of these that stay as they are.
        random: share of these that become another word; the rest becomes ``<mask>``.
    """

    vocab_size: int
    mask_index: int
    pad_index: int
    special: tuple[int, ...]
    probability: float = 0.15
    keep: float = 0.1
    random: float = 0.1

    def __post_init__(self):
        if not 0 < self.probability <= 1 or self.keep < 0 or self.random < 0 or self.keep + self.random > 1:
            raise UserError(
                f"masking: mask_prob {self.probability} must lie in (0, 1], leave_unmasked_prob {self.keep} and "
                f"random_token_prob {self.random} must be shares of at most 1 together"
            )

    @cached_property
    def _is_maskable(self) -> np.ndarray:
        """For each id (V,). A table, because `np.isin` would take a sixth of all the time spent on a block."""
        is_maskable = np.ones(self.vocab_size, dtype=bool)
        is_maskable[list(self.special)] = False
        return is_maskable

    def apply(self, tokens: np.ndarray, seed: int, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Masks one block; the result depends on the arguments alone.

        The number of masked tokens is `probability` of the maskable ones, rounded up or down at random so that the
        expected share is exact, and at least one where any is maskable.

        Args:
            tokens: ids (T,).

        Returns:
            Input ids (T,), and targets (T,): the id at positions to predict, `pad_index` elsewhere.
        """
        rng = np.random.default_rng((seed, epoch, index))
        maskable = np.flatnonzero(self._is_maskable[tokens])
        count = min(len(maskable), max(1, int(len(maskable) * self.probability + rng.random())))
        chosen = rng.choice(maskable, count, replace=False) if count else maskable
        targets = np.full_like(tokens, self.pad_index)
        targets[chosen] = tokens[chosen]
        masked = tokens.copy()
        draw = rng.random(count)
        masked[chosen[draw >= self.keep + self.random]] = self.mask_index
        replaced = chosen[(draw >= self.keep) & (draw < self.keep + self.random)]
        masked[replaced] = self._random_words(rng, len(replaced))
        return masked, targets

    def _random_words(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Uniform among the ids that are not special, found by stepping over the special ones in order."""
        words = rng.integers(0, self.vocab_size - len(self.special), count)
        for special in sorted(self.special):
            words += words >= special
        return words


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
        self.items, self.item_sizes, self.tokens_per_sample = items, item_sizes, tokens_per_sample
        self.bos, self.eos, self.masking = bos, eos, masking
        self.seed, self.shuffle, self.name = seed, shuffle, name

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


class MaskedInputsDataset(MaskedBlocksDataset):
    """A block is an item as it stands, with the symbols at its ends.

    Arguments as for :class:`MaskedBlocksDataset`. Batches hold items of similar length.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sizes = np.asarray(self.item_sizes, dtype=np.int64)

    def block(self, index: int) -> np.ndarray:
        """Input `index` as ids (T,), before masking."""
        return np.asarray(self.items[index], dtype=np.int64)

    def ordered_indices(self) -> np.ndarray:
        """By length, which in training a random factor changes a little in each epoch."""
        return by_jittered_length(self.sizes, (self.seed, self.epoch) if self.shuffle else None)


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
