"""Blocks of tokens, masked anew in each epoch, as batches for the masked-LM criterion.

Full sentences are packed into blocks; other tasks bring whole inputs. BERT's masking: 15% of the tokens are to be
predicted; 80% of these become <mask>, 10% another word, 10% stay. With whole words all pieces of a word are to be
predicted, or none; each piece becomes one of the three by itself (``create_masked_lm_predictions`` in
``create_pretraining_data.py`` of github.com/google-research/bert). The share may change over the run (Wettig et al.,
2022, arXiv 2202.08005, on what share is best; mmBERT lowers it, Marone et al., 2025).

FULL-SENTENCES packing (RoBERTa, Liu et al. 2019, section 4.2): whole sentences, across document boundaries.
Input is fairseq-preprocess's format: one sentence an item, ending ``</s>``; a document boundary is an item of ``</s>``
alone. A block is what the model reads, ``<s> s1 </s> s2 </s> </s> s3 </s>``: the extra ``</s>`` stands between
documents, so never at a block's start or end.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Optional

import numpy as np
import torch
from torch.nn import functional as F

from lazyformer_fairseq.data.batches import pad_right
from lazyformer_fairseq.data.datasets.labelled_texts import SizedDataset, by_jittered_length, collate_sources
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import read_items

ITEMS_AT_ONCE = 1 << 20  # packed in one go; bounds the memory


@dataclass(frozen=True)
class Blocks:
    """Starts and ends of blocks: arrays of one number per block, int32.

    Attributes:
        first_item, first_offset: item and token in it at which the block starts.
        last_item, last_end: last item, and the end (exclusive) of what the block takes of it.
        sizes: tokens in the block, ``<s>`` and a ``</s>`` that closes a cut sentence included.
    """

    first_item: np.ndarray
    first_offset: np.ndarray
    last_item: np.ndarray
    last_end: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)


def pack_full_sentences(item_sizes: np.ndarray, tokens_per_sample: int) -> Blocks:
    """Fill blocks greedily with whole sentences.

    A sentence that does not fit the rest of a block starts the next. One that is too long for any block is cut into
    chunks of `tokens_per_sample` - 2 tokens, each between ``<s>`` and ``</s>``; more sentences follow in the block of
    its last chunk. Every token of every sentence is in exactly one block. Runs of several boundaries count as one.

    Args:
        item_sizes: tokens per item, its ``</s>`` included; 1 for a document boundary.
        tokens_per_sample: longest block, ``<s>`` and ``</s>`` included; at least 3.

    Raises:
        UserError: `tokens_per_sample` is below 3.
    """
    if tokens_per_sample < 3:
        raise UserError(f"tokens_per_sample is {tokens_per_sample}; a block needs room for <s>, a token and </s>")
    found = [np.empty((5, 0), np.int32)]
    start = 0
    count = ITEMS_AT_ONCE
    while start < len(item_sizes):
        rows = _pack(
            np.asarray(item_sizes[start : start + count], dtype=np.int32),
            tokens_per_sample,
        )
        rows[[0, 2]] += start  # first_item, last_item
        next_start = len(item_sizes)
        if start + count < len(item_sizes):
            # The last block may go on: pack again from an item that starts one.
            starts = np.flatnonzero(rows[1] == 0)  # first_offset
            if not len(starts) or not starts[-1]:
                count *= 2
                continue
            next_start = int(rows[0, starts[-1]])
            rows = rows[:, : starts[-1]]
        found.append(rows)
        start = next_start
    return Blocks(*np.concatenate(found, axis=1))


def _pack(item_sizes: np.ndarray, tokens_per_sample: int) -> np.ndarray:
    """Return the fields of :class:`Blocks`, in its order, (5, blocks)."""
    # Items become chunks: over-long ones are cut. An item of chunk_size + 1 tokens, its own </s> among them, still
    # fills a block exactly and stays whole.
    chunk_size = tokens_per_sample - 2
    is_text = item_sizes > 1
    repeated_boundary = ~is_text & np.concatenate([[False], ~is_text[:-1]])
    counts = np.where(item_sizes > chunk_size + 1, -(-(item_sizes - 1) // chunk_size), 1)
    counts[repeated_boundary] = 0
    item = np.repeat(np.arange(len(item_sizes), dtype=np.int32), counts)
    first_chunk = np.cumsum(counts, dtype=np.int32) - counts
    number = np.arange(len(item), dtype=np.int32) - first_chunk[item]  # of the chunk in its item
    offset = number * np.int32(chunk_size)
    is_cut = number < counts[item] - 1  # a </s> is added
    sizes = np.where(is_cut, np.int32(chunk_size + 1), item_sizes[item] - offset)

    # A block is a run of chunks of at most tokens_per_sample - 1 tokens, whose first and last chunk are text.
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - sizes
    stops = np.searchsorted(ends, starts + tokens_per_sample - 1, side="right")  # of a run that starts at each chunk
    assert (stops > np.arange(len(stops))).all(), "no chunk is longer than a run"
    is_boundary = np.append(~is_text[item], False)
    next_text = (stops + is_boundary[stops]).tolist()  # never two boundaries in a row
    run_starts = []
    chunk = int(is_boundary[0])
    while chunk < len(next_text):
        run_starts.append(chunk)
        chunk = next_text[chunk]
    first = np.array(run_starts, dtype=np.int64)
    last = stops[first] - 1
    last -= is_boundary[last]

    last_end = offset[last] + sizes[last] - is_cut[last]
    taken = 1 + ends[last] - starts[first]
    return np.stack([item[first], offset[first], item[last], last_end, taken]).astype(np.int32)


@dataclass(frozen=True)
class Masking:
    """Chooses what to mask and how; UserError for impossible shares.

    Attributes:
        vocab_size: V; replacements are drawn from all of it but `special`.
        mask_index, pad_index: ids of ``<mask>`` and ``<pad>``.
        special: ids never masked and never drawn: ``<s> <pad> </s> <unk> <mask>``.
        probability: share of the other tokens to predict.
        last: the share of the last update, where the share changes; see :func:`at_share`.
        begins_word: which ids begin a word, bool (V,), where whole words are predicted; text does too after ``</s>``.
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
    last: Optional[float] = None
    begins_word: Optional[np.ndarray] = field(default=None, compare=False)

    def __post_init__(self) -> None:
        wrong = [share for share in (self.probability, self.last) if share is not None and not 0 < share <= 1]
        if wrong or self.keep < 0 or self.random < 0 or self.keep + self.random > 1:
            raise UserError(
                f"masking: mask_prob {(wrong or [self.probability])[0]} must lie in (0, 1], leave_unmasked_prob "
                f"{self.keep} and random_token_prob {self.random} must be shares of at most 1 together"
            )

    @cached_property
    def _is_maskable(self) -> np.ndarray:
        """For each id (V,). A table, because `np.isin` would take a sixth of all the time spent on a block."""
        is_maskable = np.ones(self.vocab_size, dtype=bool)
        is_maskable[list(self.special)] = False
        return is_maskable

    @cached_property
    def _is_end(self) -> np.ndarray:
        is_end = np.zeros(self.vocab_size, dtype=bool)
        is_end[list(self.special[:3])] = True  # <s> <pad> </s>
        return is_end

    def apply(
        self,
        tokens: np.ndarray,
        seed: int,
        epoch: int,
        index: int,
    ) -> tuple[np.ndarray, np.ndarray, Optional[np.ndarray]]:
        """Mask one block; the result depends on the arguments alone.

        The number of masked tokens is `probability` of the maskable ones, rounded up or down at random so that the
        expected share is exact, and at least one where any is maskable. Whole words: the last one drawn is in or out at
        random, so that the expected share is exact, and at least one is in. Where the share changes: the larger one.

        Args:
            seed: seed of the run.
            epoch: number of the epoch.
            index: number of the block.
            tokens: ids (T,).

        Returns:
            Input ids (T,); targets (T,): the id at positions to predict, `pad_index` elsewhere; and of whole words, or
            where the share changes, from which share on each of these positions is masked, in order; else None.
        """
        rng = np.random.default_rng((seed, epoch, index))
        shares = None
        maskable = np.flatnonzero(self._is_maskable[tokens])
        if self.begins_word is None and self.last is None:
            count = min(
                len(maskable),
                max(1, int(len(maskable) * self.probability + rng.random())),
            )
            chosen = maskable
            if count:
                chosen = rng.choice(maskable, count, replace=False)
        else:
            shares = self._shares(tokens, maskable, rng)
            chosen, shares = (each[shares <= max(self.probability, self.last or 0)] for each in (maskable, shares))
            count = len(chosen)
        targets = np.full_like(tokens, self.pad_index)
        targets[chosen] = tokens[chosen]
        masked = tokens.copy()
        draw = rng.random(count)
        masked[chosen[draw >= self.keep + self.random]] = self.mask_index
        replaced = chosen[(draw >= self.keep) & (draw < self.keep + self.random)]
        words = rng.integers(0, self.vocab_size - len(self.special), len(replaced))
        for special in sorted(self.special):  # uniform among the others: steps over these
            words += words >= special
        masked[replaced] = words
        return masked, targets, shares

    def _shares(self, tokens: np.ndarray, maskable: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the least share at which each place is masked: words come in random order, the first at any share."""
        word = np.arange(len(maskable))
        if self.begins_word is not None:
            begins = self.begins_word[tokens]
            begins[1:] |= self._is_end[tokens[:-1]]
            _, word = np.unique(np.cumsum(begins)[maskable], return_inverse=True)
        sizes = np.bincount(word)
        order = rng.permutation(len(sizes))
        shares = np.zeros(len(sizes))
        shares[order[1:]] = ((np.cumsum(sizes[order]) - rng.random() * sizes[order]) / max(1, len(maskable)))[1:]
        return shares[word]


def at_share(batch: dict[str, Any], share: float, pad: int) -> dict[str, Any]:
    """Return a batch of :class:`MaskedBlocksDataset` whose share changes, with as many masks as an update is to have.

    The larger share's masks hold the smaller one's, so that a data worker need not know which update a batch is for.
    """
    stays = batch["mask_shares"] <= share
    places = batch["masked_positions"]
    tokens = batch["net_input"]["src_tokens"].clone()
    target = batch["target"].clone()
    tokens.view(-1)[places[~stays]] = target.view(-1)[places[~stays]]
    target.view(-1)[places[~stays]] = pad
    changed = {
        **batch,
        "net_input": {**batch["net_input"], "src_tokens": tokens},
        "target": target,
        "masked_positions": places[stays],
    }
    del changed["mask_shares"]
    return changed


# A batch with one of these depends on the update that reads it.
CHANGING = {
    "mask_shares",
    "to_cut",
}


def cut(batch: dict[str, Any], length: int, pad: int) -> dict[str, Any]:
    """Return a batch of which each row is a piece of `length` tokens of a block; those of padding alone are left out.

    So an update has the same tokens and targets whatever the length is, in the same order.
    """
    whole = batch["net_input"]["src_tokens"], batch["target"]
    rows = [F.pad(each, (0, -each.size(1) % length), value=pad).view(-1, length) for each in whole]
    tokens, target = (each[rows[0].ne(pad).any(1)] for each in rows)
    sizes = tokens.ne(pad).sum(1)
    net_input = {
        "src_tokens": tokens,
        "src_lengths": sizes,
        "has_padding": bool((sizes < length).any()),
    }
    places = target.flatten().ne(pad).nonzero().squeeze(1)
    return {
        **batch,
        "net_input": batch["net_input"] | net_input,
        "target": target,
        "masked_positions": places,
    }


# Batches are as wide as a multiple of this, if the blocks may be. Matrix units read whole eights, and full blocks end
# anywhere in the last of them: 505 to 512 tokens are one shape, to compile or to choose a kernel for, not eight.
WIDTH_MULTIPLE = 8


@dataclass(eq=False, repr=False)
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

    Attributes:
        is_cut: whether batches are to be cut, see :func:`cut`, as the update says that reads them.

    Raises:
        UserError: where the items are not sentences.
    """

    items: Any
    item_sizes: np.ndarray
    tokens_per_sample: int
    bos: int
    eos: int
    masking: Masking
    seed: int = 1
    shuffle: bool = True
    name: str = "data"
    is_cut = False

    def __post_init__(self) -> None:
        if not len(self.items):
            raise UserError(f"{self.name}: holds no sentence; was the corpus empty?")
        if int(self.items[0][-1]) != self.eos:
            raise UserError(
                f"{self.name}: its first sentence does not end in </s>; preprocess it with the end symbol on"
            )

    @property
    def most(self) -> int:
        """Tokens of a row of a batch."""
        return self.tokens_per_sample

    @abstractmethod
    def block(self, index: int) -> np.ndarray:
        """Block `index` as ids (T,), before masking."""

    def __getitem__(self, index: int) -> dict:
        tokens, targets, shares = self.masking.apply(self.block(index), self.seed, self.epoch, index)
        sample = {
            "id": index,
            "source": torch.from_numpy(tokens),
            "target": torch.from_numpy(targets),
        }
        if self.masking.last is None:
            return sample
        return {**sample, "mask_shares": torch.from_numpy(shares)}

    def collater(self, samples: list[dict]) -> dict:
        """Return a batch in the shape that fairseq's trainer and masked-LM criterions expect.

        Also `masked_positions`, the places of the targets among the B * T, int64 (M,): counted here, so that nobody
        waits for a GPU to count them. Where the share of masks changes, `mask_shares` (M,), see :func:`at_share`.
        """
        if not samples:
            return {}
        longest = max(len(sample["source"]) for sample in samples)
        time = min(longest + -longest % WIDTH_MULTIPLE, self.most)
        pad = self.masking.pad_index
        target = pad_right([sample["target"] for sample in samples], pad, time)
        batch = {
            **collate_sources(samples, pad, time),
            "target": target,
            "masked_positions": target.flatten().ne(pad).nonzero().squeeze(1),
        }
        if "mask_shares" in samples[0]:
            batch["mask_shares"] = torch.cat([sample["mask_shares"] for sample in samples])
        if self.is_cut:
            batch["to_cut"] = True
        return batch

    def ordered_indices(self) -> np.ndarray:
        """Return a new random order each epoch. Not by length: nearly all full blocks have the same length."""
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


@dataclass(eq=False, repr=False)
class MaskedInputsDataset(MaskedBlocksDataset):
    """A block is an item as it stands, with the symbols at its ends.

    Arguments as for :class:`MaskedBlocksDataset`. Batches hold items of similar length.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes = np.asarray(self.item_sizes, dtype=np.int64)

    def block(self, index: int) -> np.ndarray:
        """Input `index` as ids (T,), before masking."""
        return np.asarray(self.items[index], dtype=np.int64)

    def ordered_indices(self) -> np.ndarray:
        """Return the order by length, which in training a random factor changes a little in each epoch."""
        return by_jittered_length(self.sizes, (self.seed, self.epoch) if self.shuffle else None)


@dataclass(eq=False, repr=False)
class FullSentencesDataset(MaskedBlocksDataset):
    """Packs an indexed dataset of sentences and masks what it packs.

    Arguments as for :class:`MaskedBlocksDataset`; for blocks see
    :func:`pack_full_sentences`.

    Args:
        within_documents: whether a batch says where documents end, so that tokens see their own alone.
        document_positions: whether the positions of each document begin anew then.

    Raises:
        UserError: where the items are not sentences.
    """

    within_documents: bool = False
    document_positions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks = pack_full_sentences(self.item_sizes, self.tokens_per_sample)
        if not len(self.blocks):
            raise UserError(f"{self.name}: holds document boundaries but no sentence; was the corpus empty?")
        self.sizes = self.blocks.sizes

    def block(self, index: int) -> np.ndarray:
        """Block `index` as ids (T,), before masking."""
        blocks = self.blocks
        first = int(blocks.first_item[index])
        last = int(blocks.last_item[index])
        tokens = read_items(self.items, first, last)
        sizes = self.item_sizes[first : last + 1]
        repeated = np.flatnonzero((sizes[1:] == 1) & (sizes[:-1] == 1)) + 1
        if len(repeated):  # one of several boundaries in a row
            tokens = np.delete(tokens, np.cumsum(sizes)[repeated] - 1)
        start = int(blocks.first_offset[index])
        end = len(tokens) - int(sizes[-1]) + int(blocks.last_end[index])
        block = np.full(self.sizes[index], self.eos)  # which closes a cut sentence; any other brings its own
        block[0] = self.bos
        block[1 : 1 + end - start] = tokens[start:end]
        return block

    def collater(self, samples: list[dict]) -> dict:
        """Return a batch; of documents apart also their lengths in `net_input`."""
        batch = super().collater(samples)
        if samples and self.within_documents:
            lengths = [document_lengths(sample["source"].numpy(), self.eos) for sample in samples]
            batch["net_input"] |= {
                "documents": lengths,
                "positions_begin_anew": self.document_positions,
            }
        return batch


def document_lengths(block: np.ndarray, eos: int) -> list[int]:
    """Return the lengths of the documents in a block (T,): each ends with two ``</s>``, the last anywhere."""
    is_end = block == eos
    ends = np.flatnonzero(is_end[1:] & is_end[:-1]) + 2
    return np.diff(ends, prepend=0, append=len(block)).tolist()
