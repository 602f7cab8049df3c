"""Pairs of texts, masked and drawn anew in each epoch: does the second follow the first? (BERT, section 3.1)."""

from functools import cached_property

import numpy as np
import torch

from lazyformer_fairseq.data.datasets.labelled_texts import token_types_of
from lazyformer_fairseq.data.datasets.masked_blocks import MaskedBlocksDataset
from lazyformer_fairseq.data.datasets.pairing import Documents, Pairs, Texts, draw_pairs
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import read_items


class SentencePairsDataset(MaskedBlocksDataset):
    """``<s> first </s> second </s>``, see :func:`~lazyformer_fairseq.data.datasets.pairing.draw_pairs`.

    An epoch has a number of pairs of its own.

    Args:
        items, item_sizes, tokens_per_sample, bos, eos, masking, seed, shuffle, name: as for
            :class:`MaskedBlocksDataset`.
        separators: how many ``</s>`` stand between the two texts.
        has_token_types: whether batches say which text a token is of.

    Raises:
        UserError: where the items are not sentences of two documents or more, or a pair has no room.
    """

    def __init__(self, *args, separators: int = 2, has_token_types: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.separators = separators
        self.has_token_types = has_token_types
        self.room = self.tokens_per_sample - 2 - separators  # of text
        if self.room < 2:
            raise UserError(
                f"tokens_per_sample is {self.tokens_per_sample}; a pair needs room for <s>, two texts and "
                f"{separators + 1} </s>: at least {separators + 4}"
            )
        self.documents = Documents(self.item_sizes)
        if len(self.documents) < 2:
            found = "no sentence" if not len(self.documents) else f"{len(self.items)} items, all of one document"
            raise UserError(
                f"{self.name}: holds {found}; --next-sentence draws texts of other documents, and needs two or more, "
                "with an empty line between them where they are binarised (lazyformer corpus leaves one)"
            )

    @cached_property
    def pairs(self) -> Pairs:
        """Those of the epoch."""
        return draw_pairs(self.documents, self.room, np.random.default_rng((self.seed, self.epoch)))

    @property
    def sizes(self) -> np.ndarray:
        """Tokens a pair in this epoch, all counted."""
        return self.pairs.sizes + (2 + self.separators)

    def __len__(self) -> int:
        return len(self.pairs)

    def size(self, index: int) -> int:
        return int(self.pairs.sizes[index]) + 2 + self.separators

    num_tokens = size

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.__dict__.pop("pairs", None)
        super().set_epoch(epoch)

    def block(self, index: int) -> np.ndarray:
        """Pair `index` as ids (T,), before masking."""
        first, second = (self._text(texts, index) for texts in (self.pairs.first, self.pairs.second))
        block = np.full(self.size(index), self.eos)
        block[0] = self.bos
        block[1 : 1 + len(first)] = first
        block[-1 - len(second) : -1] = second
        return block

    def _text(self, texts: Texts, index: int) -> np.ndarray:
        first, end, skip, size = (int(each[index]) for each in texts)
        tokens = read_items(self.items, first, end - 1)
        return tokens[tokens != self.eos][skip : skip + size]

    def __getitem__(self, index: int) -> dict:
        return {**super().__getitem__(index), "is_random": bool(self.pairs.is_random[index])}

    def collater(self, samples: list[dict]) -> dict:
        """As the base's, with `next_sentence`, int64 (B,): BERT's 0 where the second text follows, 1 where it does not.

        For models with token types `net_input` has `token_types` (B, T) too.
        """
        batch = super().collater(samples)
        if not batch:
            return batch
        batch["next_sentence"] = torch.tensor([int(sample["is_random"]) for sample in samples])
        if self.has_token_types:
            tokens = batch["net_input"]["src_tokens"]
            batch["net_input"]["token_types"] = token_types_of(tokens, self.eos, self.masking.pad_index)
        return batch
