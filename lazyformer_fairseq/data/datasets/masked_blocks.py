"""Blocks of tokens with dynamic masking, and their batches for the masked-LM criterion.

Full sentences are packed into blocks, unless a task uses each input as a whole. Masking follows BERT: 15% of the tokens
are predicted; of these, 80% are replaced with <mask>, 10% are replaced with a random token, and 10% are left unchanged.
With whole-word masking, either all or none of a word's tokens are predicted; the replacement is still chosen
independently for each token (``create_masked_lm_predictions`` in ``create_pretraining_data.py`` of
github.com/google-research/bert). The masking rate may change over the run, as in mmBERT, which lowers it (Marone et
al., 2025); Wettig et al. (2022, arXiv 2202.08005) compare constant rates.

FULL-SENTENCES packing (RoBERTa, Liu et al. 2019, section 4.2) fills blocks with whole sentences, across document
boundaries. The input has fairseq-preprocess's format: each item is a sentence that ends with ``</s>``, and an item with
only ``</s>`` is a document boundary. A block is a model input, such as ``<s> s1 </s> s2 </s> </s> s3 </s>``. The
extra ``</s>`` separates documents, so it never occurs at the start or end of a block.
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

ITEMS_AT_ONCE = 1 << 20  # number of items to pack per chunk, which bounds the memory


@dataclass(frozen=True)
class Blocks:
    """The boundaries of blocks, as int32 arrays (blocks,).

    Attributes:
        first_item, first_offset: the block's first item, and the offset in it at which the block starts.
        last_item, last_end: the block's last item, and the offset (exclusive) in it at which the block ends.
        sizes: number of tokens in the block, including ``<s>`` and the ``</s>`` added to a split sentence.
    """

    first_item: np.ndarray
    first_offset: np.ndarray
    last_item: np.ndarray
    last_end: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)


def pack_full_sentences(item_sizes: np.ndarray, tokens_per_sample: int) -> Blocks:
    """Pack whole sentences into blocks greedily.

    A sentence that does not fit into the rest of a block starts the next one. A sentence that is too long for any block
    is split into chunks of `tokens_per_sample` - 2 tokens, each between ``<s>`` and ``</s>``, and the block with the
    last chunk is filled up with the following sentences. Every token of every sentence is in exactly one block.
    Consecutive document boundaries count as one.

    Args:
        item_sizes: number of tokens per item, including its ``</s>``; 1 for a document boundary.
        tokens_per_sample: maximum number of tokens per block, including ``<s>`` and ``</s>``; at least 3.

    Raises:
        UserError: `tokens_per_sample` is below 3.
    """
    if tokens_per_sample < 3:
        raise UserError(
            f"--tokens-per-sample {tokens_per_sample}: must be at least 3, because a block contains <s>, text and </s>"
        )
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
            # The last block may extend into later items, so packing resumes at the last item that starts a block.
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
    """Return the fields of :class:`Blocks` as the rows of an array, (5, blocks)."""
    # Items become chunks, and long items are split. An item of chunk_size + 1 tokens, including its </s>, fills a block
    # exactly, so it is not split.
    chunk_size = tokens_per_sample - 2
    is_text = item_sizes > 1
    repeated_boundary = ~is_text & np.concatenate([[False], ~is_text[:-1]])
    is_long = item_sizes > chunk_size + 1
    counts = np.where(is_long, -(-(item_sizes - 1) // chunk_size), 1)
    counts[repeated_boundary] = 0
    item = np.repeat(np.arange(len(item_sizes), dtype=np.int32), counts)
    first_chunk = np.cumsum(counts, dtype=np.int32) - counts
    number = np.arange(len(item), dtype=np.int32) - first_chunk[item]  # index of the chunk in its item
    offset = number * np.int32(chunk_size)
    is_cut = number < counts[item] - 1  # these chunks get a </s>
    sizes = np.where(is_cut, np.int32(chunk_size + 1), item_sizes[item] - offset)

    # A block is a run of chunks with at most tokens_per_sample - 1 tokens that starts and ends with text.
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - sizes
    stops = np.searchsorted(ends, starts + tokens_per_sample - 1, side="right")  # end of the run from each chunk
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
    """The masking procedure for blocks.

    Attributes:
        vocab_size: vocabulary size V; random replacements are drawn from all ids except `special`.
        mask_index, pad_index: ids of ``<mask>`` and ``<pad>``.
        special: ids that are never masked and never drawn: ``<s> <pad> </s> <unk> <mask>``.
        probability: masking rate, the fraction of the other tokens to predict.
        keep: fraction of the tokens to predict that are left unchanged.
        random: fraction of the tokens to predict that are replaced with a random token; ``<mask>`` replaces the rest.
        last: masking rate in the last update, if it changes over the run; see :func:`apply_masking_rate`.
        begins_word: mask of the ids that begin a word, bool (V,), for whole-word masking. A word also begins after
            ``</s>``.

    Raises:
        UserError: a rate or fraction is out of range.
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
        rates = [rate for rate in (self.probability, self.last) if rate is not None]
        wrong = [rate for rate in rates if not 0 < rate <= 1]
        if wrong or self.keep < 0 or self.random < 0 or self.keep + self.random > 1:
            raise UserError(
                f"--mask-prob {(wrong or [self.probability])[0]} must be above 0 and at most 1, and "
                f"--leave-unmasked-prob {self.keep} and --random-token-prob {self.random} must be at least 0 and add "
                "up to at most 1"
            )

    @cached_property
    def _is_maskable(self) -> np.ndarray:
        """Lookup table of the maskable ids, bool (V,); `np.isin` would be a sixth of the work per block."""
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

        The number of masked tokens is `probability` times the number of maskable ones, rounded stochastically so that
        the expected rate is exact. With whole-word masking, the last sampled word is included at random for the same
        reason. At least one token or word is masked if any can be. If the masking rate changes over the run, the block
        is masked at the larger of the first and last rates; :func:`apply_masking_rate` later reduces the masks to the
        current rate.

        Args:
            tokens: ids (T,).
            seed: seed of the run.
            epoch: current epoch.
            index: index of the block.

        Returns:
            The input ids (T,); the targets (T,), which are the original ids at the positions to predict and `pad_index`
            elsewhere; and the smallest masking rate at which each of these positions is masked, in position
            order. The last item is None if the rate is constant and whole-word masking is off.
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
            largest_rate = max(self.probability, self.last or 0)
            is_chosen = shares <= largest_rate
            chosen = maskable[is_chosen]
            shares = shares[is_chosen]
            count = len(chosen)

        targets = np.full_like(tokens, self.pad_index)
        targets[chosen] = tokens[chosen]

        masked = tokens.copy()
        draw = rng.random(count)
        masked[chosen[draw >= self.keep + self.random]] = self.mask_index
        is_replaced = (draw >= self.keep) & (draw < self.keep + self.random)
        replaced = chosen[is_replaced]
        words = rng.integers(0, self.vocab_size - len(self.special), len(replaced))
        for special in sorted(self.special):  # shifts past the special ids; all others are equally likely
            words += words >= special
        masked[replaced] = words
        return masked, targets, shares

    def _shares(self, tokens: np.ndarray, maskable: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the smallest masking rate at which each maskable position is masked.

        Words are masked in random order; the first one is masked at any rate.
        """
        word = np.arange(len(maskable))
        if self.begins_word is not None:
            begins = self.begins_word[tokens]
            begins[1:] |= self._is_end[tokens[:-1]]
            _, word = np.unique(np.cumsum(begins)[maskable], return_inverse=True)

        sizes = np.bincount(word)
        order = rng.permutation(len(sizes))
        sizes_in_order = sizes[order]
        masked_tokens = np.cumsum(sizes_in_order) - rng.random() * sizes_in_order
        shares_in_order = masked_tokens / max(1, len(maskable))
        shares = np.zeros(len(sizes))
        shares[order[1:]] = shares_in_order[1:]
        return shares[word]


def apply_masking_rate(batch: dict[str, Any], share: float, pad: int) -> dict[str, Any]:
    """Reduce the masks of a :class:`MaskedBlocksDataset` batch to the masking rate `share`.

    This is used if the masking rate changes over the run. The masks at a larger rate include all masks at a smaller
    one, so data workers do not need to know which update reads the batch.
    """
    stays = batch["mask_shares"] <= share
    places = batch["masked_positions"]
    tokens = batch["net_input"]["src_tokens"].clone()
    target = batch["target"].clone()
    unmasked = places[~stays]
    tokens.view(-1)[unmasked] = target.view(-1)[unmasked]
    target.view(-1)[unmasked] = pad
    changed = {
        **batch,
        "net_input": {**batch["net_input"], "src_tokens": tokens},
        "target": target,
        "masked_positions": places[stays],
    }
    del changed["mask_shares"]
    return changed


# Keys whose values depend on the update that reads the batch.
UPDATE_DEPENDENT_KEYS = {
    "mask_shares",
    "to_cut",
}


def cut(batch: dict[str, Any], length: int, pad: int) -> dict[str, Any]:
    """Split the blocks of a batch into rows of `length` tokens, dropping rows that contain only padding.

    An update therefore has the same tokens and targets in the same order for any length.
    """

    def split_rows(whole: torch.Tensor) -> torch.Tensor:
        missing = -whole.size(1) % length
        return F.pad(whole, (0, missing), value=pad).view(-1, length)

    tokens = split_rows(batch["net_input"]["src_tokens"])
    target = split_rows(batch["target"])
    has_tokens = tokens.ne(pad).any(1)
    tokens = tokens[has_tokens]
    target = target[has_tokens]

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


# A batch's width is rounded up to a multiple of this number, though never beyond the maximum block length. Tensor cores
# work on groups of eight, and the lengths of full blocks differ only within the last group. Because of the rounding,
# widths from 505 to 512 are a single shape to compile or to select a kernel for, rather than eight shapes.
WIDTH_MULTIPLE = 8


@dataclass(eq=False, repr=False)
class MaskedBlocksDataset(SizedDataset):
    """The base class of datasets that build masked blocks from an indexed dataset of sentences.

    Args:
        items: indexed dataset of sentences (arrays or tensors that end in `eos`) and document boundaries (only `eos`).
        item_sizes: number of tokens per item.
        tokens_per_sample: maximum number of tokens per block, including special tokens.
        bos, eos: ids of ``<s>`` and ``</s>``.
        masking: the masking procedure.
        seed: random seed; a block's masks depend only on the seed, the epoch and the block's index.
        shuffle: whether to shuffle the blocks.
        name: path of the data without its extension.

    Attributes:
        is_cut: whether the update that reads a batch may split its blocks; see :func:`cut`.

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
            raise UserError(f"{self.name} contains no sentences; was the corpus empty?")
        if int(self.items[0][-1]) != self.eos:
            raise UserError(
                f"{self.name}: the first sentence does not end in </s>; binarize the text with </s> after each sentence"
            )

    @property
    def most(self) -> int:
        """Maximum number of tokens per row of a batch."""
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
        """Collate samples into a batch in the format of fairseq's trainer and masked-LM criterions.

        The batch also has `masked_positions`, the indices of the targets among the B * T tokens, int64 (M,). Computing
        them here avoids a GPU synchronization. If the masking rate changes over the run, the batch has `mask_shares`
        (M,); see :func:`apply_masking_rate`.
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
        """Return the block indices in a new random order in each epoch; blocks have nearly equal lengths."""
        if not self.shuffle:
            return np.arange(len(self))
        return np.random.default_rng((self.seed, self.epoch)).permutation(len(self))

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """False, because order and masks depend on the epoch, and persistent workers would not see it change."""
        return False

    def packing_efficiency(self, tokens_per_sample: int) -> float:
        """Return the fraction of non-padding tokens if all blocks are padded to `tokens_per_sample`."""
        return float(self.sizes.sum(dtype=np.int64) / (len(self) * tokens_per_sample))


@dataclass(eq=False, repr=False)
class MaskedInputsDataset(MaskedBlocksDataset):
    """A dataset that masks each item separately, without packing; items include their special tokens.

    See :class:`MaskedBlocksDataset` for the arguments. Batches consist of items of similar length.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes = np.asarray(self.item_sizes, dtype=np.int64)

    def block(self, index: int) -> np.ndarray:
        """Return input `index` as ids (T,), before masking."""
        return np.asarray(self.items[index], dtype=np.int64)

    def ordered_indices(self) -> np.ndarray:
        """Return the item indices sorted by length, with random noise in each epoch if `shuffle` is set."""
        return by_jittered_length(self.sizes, (self.seed, self.epoch) if self.shuffle else None)


@dataclass(eq=False, repr=False)
class FullSentencesDataset(MaskedBlocksDataset):
    """A dataset of masked blocks packed with full sentences.

    See :class:`MaskedBlocksDataset` for the other arguments and :func:`pack_full_sentences` for the packing.

    Args:
        within_documents: whether batches include document lengths, which restrict attention to the query's document.
        document_positions: whether positions restart in each document; requires `within_documents`.

    Raises:
        UserError: the items are not sentences.
    """

    within_documents: bool = False
    document_positions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks = pack_full_sentences(self.item_sizes, self.tokens_per_sample)
        if not len(self.blocks):
            raise UserError(f"{self.name} contains document boundaries but no sentences; was the corpus empty?")
        self.sizes = self.blocks.sizes

    def block(self, index: int) -> np.ndarray:
        """Return block `index` as ids (T,), before masking."""
        blocks = self.blocks
        first = int(blocks.first_item[index])
        last = int(blocks.last_item[index])
        tokens = read_items(self.items, first, last)
        sizes = self.item_sizes[first : last + 1]
        is_boundary = sizes == 1
        repeated = np.flatnonzero(is_boundary[1:] & is_boundary[:-1]) + 1
        if len(repeated):  # consecutive boundaries count as one
            ends = np.cumsum(sizes)
            tokens = np.delete(tokens, ends[repeated] - 1)

        start = int(blocks.first_offset[index])
        end = len(tokens) - int(sizes[-1]) + int(blocks.last_end[index])
        block = np.full(self.sizes[index], self.eos)  # the last id remains </s> if the sentence is split
        block[0] = self.bos
        block[1 : 1 + end - start] = tokens[start:end]
        return block

    def collater(self, samples: list[dict]) -> dict:
        """Collate samples into a batch; if `within_documents`, `net_input` also has the document lengths."""
        batch = super().collater(samples)
        if samples and self.within_documents:
            lengths = [document_lengths(sample["source"].numpy(), self.eos) for sample in samples]
            batch["net_input"] |= {
                "documents": lengths,
                "restart_positions": self.document_positions,
            }
        return batch


def document_lengths(block: np.ndarray, eos: int) -> list[int]:
    """Return the lengths of the documents in a block (T,); all except the last end with two ``</s>``."""
    is_end = block == eos
    ends = np.flatnonzero(is_end[1:] & is_end[:-1]) + 2
    return np.diff(ends, prepend=0, append=len(block)).tolist()
