"""Blocks of tokens, which are masked anew in each epoch, and their batches for the masked-LM criterion.

Full sentences are packed into blocks; other tasks have whole inputs. The masking is BERT's: 15% of the tokens are to be
predicted, of which 80% become <mask>, 10% another token, and 10% stay. With whole-word masks, either all pieces of a
word are to be predicted or none; each piece becomes one of the three independently (``create_masked_lm_predictions`` in
``create_pretraining_data.py`` of github.com/google-research/bert). The share may change over the run (Wettig et al.,
2022, arXiv 2202.08005, study which share is best; mmBERT lowers it, Marone et al., 2025).

FULL-SENTENCES packing (RoBERTa, Liu et al. 2019, section 4.2) fills blocks with whole sentences, across document
boundaries. The input has fairseq-preprocess's format: one sentence per item, which ends with ``</s>``; a document
boundary is an item of ``</s>`` alone. A block is what the model reads, ``<s> s1 </s> s2 </s> </s> s3 </s>``. The extra
``</s>`` stands between documents, so it is never at a block's start or end.
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

ITEMS_AT_ONCE = 1 << 20  # items that are packed in one go, which bounds the memory


@dataclass(frozen=True)
class Blocks:
    """The starts and ends of blocks, in arrays with one number per block, int32.

    Attributes:
        first_item, first_offset: the item, and the token in it, at which the block starts.
        last_item, last_end: the last item, and the end (exclusive) of the part of it that the block has.
        sizes: number of tokens in the block, with ``<s>`` and any ``</s>`` that closes a cut sentence.
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

    A sentence that does not fit into the rest of a block starts the next one. A sentence that is too long for any block
    is cut into chunks of `tokens_per_sample` - 2 tokens, each between ``<s>`` and ``</s>``; the block of its last chunk
    is filled with further sentences. Every token of every sentence is in exactly one block. Several boundaries in a row
    count as one.

    Args:
        item_sizes: number of tokens per item, including its ``</s>``; 1 for a document boundary.
        tokens_per_sample: number of tokens in the longest block, including ``<s>`` and ``</s>``; at least 3.

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
            # The last block may continue with later items: pack again from the last item that starts a block.
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
    # Items become chunks; items that are too long are cut. An item of chunk_size + 1 tokens, including its own </s>,
    # still fills a block exactly and stays whole.
    chunk_size = tokens_per_sample - 2
    is_text = item_sizes > 1
    repeated_boundary = ~is_text & np.concatenate([[False], ~is_text[:-1]])
    counts = np.where(item_sizes > chunk_size + 1, -(-(item_sizes - 1) // chunk_size), 1)
    counts[repeated_boundary] = 0
    item = np.repeat(np.arange(len(item_sizes), dtype=np.int32), counts)
    first_chunk = np.cumsum(counts, dtype=np.int32) - counts
    number = np.arange(len(item), dtype=np.int32) - first_chunk[item]  # of the chunk in its item
    offset = number * np.int32(chunk_size)
    is_cut = number < counts[item] - 1  # such chunks get a </s>
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
    """The choice of what to mask, and how.

    Attributes:
        vocab_size: V; random replacements are drawn from all ids except `special`.
        mask_index, pad_index: ids of ``<mask>`` and ``<pad>``.
        special: ids that are never masked and never drawn: ``<s> <pad> </s> <unk> <mask>``.
        probability: share of the other tokens to predict.
        keep: share of the tokens to predict that stay as they are.
        random: share of the tokens to predict that become a random token; the rest become ``<mask>``.
        last: the share to predict in the last update, if the share changes; see :func:`at_share`.
        begins_word: which ids begin a word, bool (V,), if whole words are predicted. A word also begins after ``</s>``.

    Raises:
        UserError: a share is impossible.
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
                f"{self.keep} and random_token_prob {self.random} must be shares with a sum of at most 1"
            )

    @cached_property
    def _is_maskable(self) -> np.ndarray:
        """A table of the ids that may be masked, bool (V,); `np.isin` would take a sixth of the time per block."""
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
        """Mask one block; the result depends only on the arguments.

        The number of masked tokens is `probability` times the number of maskable ones, rounded up or down at random so
        that the expected share is exact; it is at least one if any token is maskable. With whole words, the last word
        drawn is included or not at random, so that the expected share is exact, and at least one word is included. If
        the share changes over the run, the larger one is used.

        Args:
            tokens: ids (T,).
            seed: seed of the run.
            epoch: number of the epoch.
            index: number of the block.

        Returns:
            The input ids (T,); the targets (T,), which are the ids at positions to predict and `pad_index` elsewhere;
            and, with whole words or if the share changes, the share from which on each of these positions is masked, in
            the order of the positions, or else None.
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
        for special in sorted(self.special):  # skips the special ids, so that all others are equally likely
            words += words >= special
        masked[replaced] = words
        return masked, targets, shares

    def _shares(self, tokens: np.ndarray, maskable: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the smallest share at which each place is masked.

        Words are masked in random order; the first one is masked at any share.
        """
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
    """Return a batch of :class:`MaskedBlocksDataset` with only the masks of `share`, if the share changes over the run.

    The masks of a larger share include those of a smaller one, so a data worker need not know which update reads the
    batch.
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


# A batch with one of these keys depends on the update that reads it.
CHANGING = {
    "mask_shares",
    "to_cut",
}


def cut(batch: dict[str, Any], length: int, pad: int) -> dict[str, Any]:
    """Cut the blocks of a batch into rows of `length` tokens, without rows that only have padding.

    So an update has the same tokens and targets in the same order, whatever the length is.
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


# The width of a batch is a multiple of this, if the longest block allows it. Matrix units work on groups of eight, and
# the lengths of full blocks differ within the last group. So 505 to 512 tokens are one shape to compile or to choose a
# kernel for, instead of eight.
WIDTH_MULTIPLE = 8


@dataclass(eq=False, repr=False)
class MaskedBlocksDataset(SizedDataset):
    """The base of datasets that make blocks from an indexed dataset of sentences, and mask them.

    Args:
        items: indexed dataset of sentences (each an array or tensor that ends in `eos`) and boundaries (`eos` alone).
        item_sizes: number of tokens per item.
        tokens_per_sample: number of tokens in the longest block, special ones included.
        bos, eos: ids of ``<s>`` and ``</s>``.
        masking: the choice of what to mask, and how.
        seed: everything random depends only on it, the epoch and the block's number.
        shuffle: whether batches have blocks in random order.
        name: path of the data without its ending.

    Attributes:
        is_cut: whether the update that reads a batch is to cut it; see :func:`cut`.

    Raises:
        UserError: the items are not sentences.
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
            raise UserError(f"{self.name}: contains no sentences; was the corpus empty?")
        if int(self.items[0][-1]) != self.eos:
            raise UserError(
                f"{self.name}: its first sentence does not end in </s>; binarise the text with </s> after each sentence"
            )

    @property
    def most(self) -> int:
        """Largest number of tokens in a row of a batch."""
        return self.tokens_per_sample

    @abstractmethod
    def block(self, index: int) -> np.ndarray:
        """Return block `index` as ids (T,), before masking."""

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
        """Collate samples into a batch in the form that fairseq's trainer and masked-LM criterions expect.

        The batch also has `masked_positions`, the places of the targets among the B * T tokens, int64 (M,). They are
        computed here, so that no one needs to wait for a GPU to find them. If the share of masks changes over the run,
        the batch has `mask_shares` (M,); see :func:`at_share`.
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
        """Return a new random order in each epoch; lengths do not matter, since they are nearly all the same."""
        if not self.shuffle:
            return np.arange(len(self))
        return np.random.default_rng((self.seed, self.epoch)).permutation(len(self))

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """False, as order and masks depend on the epoch, and a data worker that lives on would miss the next one."""
        return False

    def packing_efficiency(self, tokens_per_sample: int) -> float:
        """Return the share of places in all blocks that hold tokens; the rest is padding."""
        return float(self.sizes.sum(dtype=np.int64) / (len(self) * tokens_per_sample))


@dataclass(eq=False, repr=False)
class MaskedInputsDataset(MaskedBlocksDataset):
    """A dataset in which each block is an item as it is, with the symbols at its ends.

    The arguments are those of :class:`MaskedBlocksDataset`. Batches have items of similar length.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes = np.asarray(self.item_sizes, dtype=np.int64)

    def block(self, index: int) -> np.ndarray:
        """Return input `index` as ids (T,), before masking."""
        return np.asarray(self.items[index], dtype=np.int64)

    def ordered_indices(self) -> np.ndarray:
        """Return the order by length, which a random factor changes slightly in each epoch of training."""
        return by_jittered_length(self.sizes, (self.seed, self.epoch) if self.shuffle else None)


@dataclass(eq=False, repr=False)
class FullSentencesDataset(MaskedBlocksDataset):
    """A dataset that packs sentences into blocks and masks them.

    The arguments are those of :class:`MaskedBlocksDataset`; for the blocks, see :func:`pack_full_sentences`.

    Args:
        within_documents: whether a batch says where documents end, so that tokens see only their own document.
        document_positions: whether positions then restart in each document.

    Raises:
        UserError: the items are not sentences.
    """

    within_documents: bool = False
    document_positions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks = pack_full_sentences(self.item_sizes, self.tokens_per_sample)
        if not len(self.blocks):
            raise UserError(f"{self.name}: contains document boundaries but no sentences; was the corpus empty?")
        self.sizes = self.blocks.sizes

    def block(self, index: int) -> np.ndarray:
        """Return block `index` as ids (T,), before masking."""
        blocks = self.blocks
        first = int(blocks.first_item[index])
        last = int(blocks.last_item[index])
        tokens = read_items(self.items, first, last)
        sizes = self.item_sizes[first : last + 1]
        repeated = np.flatnonzero((sizes[1:] == 1) & (sizes[:-1] == 1)) + 1
        if len(repeated):  # several boundaries in a row count as one
            tokens = np.delete(tokens, np.cumsum(sizes)[repeated] - 1)
        start = int(blocks.first_offset[index])
        end = len(tokens) - int(sizes[-1]) + int(blocks.last_end[index])
        block = np.full(self.sizes[index], self.eos)  # its last id stays if it closes a cut sentence
        block[0] = self.bos
        block[1 : 1 + end - start] = tokens[start:end]
        return block

    def collater(self, samples: list[dict]) -> dict:
        """Collate samples into a batch; with `within_documents`, `net_input` also has the documents' lengths."""
        batch = super().collater(samples)
        if samples and self.within_documents:
            lengths = [document_lengths(sample["source"].numpy(), self.eos) for sample in samples]
            batch["net_input"] |= {
                "documents": lengths,
                "positions_begin_anew": self.document_positions,
            }
        return batch


def document_lengths(block: np.ndarray, eos: int) -> list[int]:
    """Return the lengths of the documents in a block (T,); each ends with two ``</s>``, except for the last one."""
    is_end = block == eos
    ends = np.flatnonzero(is_end[1:] & is_end[:-1]) + 2
    return np.diff(ends, prepend=0, append=len(block)).tolist()
