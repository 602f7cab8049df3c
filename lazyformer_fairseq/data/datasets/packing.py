"""FULL-SENTENCES packing (RoBERTa, Liu et al. 2019, section 4.2): whole sentences, across document boundaries.

Input is fairseq-preprocess's format: one sentence an item, ending ``</s>``; a document boundary is an item of ``</s>``
alone. A block is what the model reads, ``<s> s1 </s> s2 </s> </s> s3 </s>``: the extra ``</s>`` stands between
documents, so never at a block's start or end.
"""

from dataclasses import dataclass

import numpy as np

from lazyformer_fairseq.errors import UserError


@dataclass(frozen=True)
class Blocks:
    """Where each block starts and ends: arrays of one number per block.

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
    """Fills blocks greedily with whole sentences.

    A sentence that does not fit the rest of a block starts the next. One too long for any block is cut into pieces of
    `tokens_per_sample` - 2 tokens, each between ``<s>`` and ``</s>``; more sentences follow in the block of its last
    piece. Every token of every sentence is in exactly one block. Runs of several boundaries count as one.

    Args:
        item_sizes: tokens an item, its ``</s>`` included; 1 for a document boundary.
        tokens_per_sample: the longest block, ``<s>`` and ``</s>`` included; at least 3.

    Raises:
        UserError: for `tokens_per_sample` below 3.
    """
    if tokens_per_sample < 3:
        raise UserError(f"tokens_per_sample is {tokens_per_sample}; a block needs room for <s>, a token and </s>")
    pieces = _cut_pieces(np.asarray(item_sizes, dtype=np.int32), tokens_per_sample - 2)
    end_of_tokens = np.cumsum(pieces.sizes, dtype=np.int64)
    first, last = _greedy_runs(end_of_tokens, pieces.is_text, tokens_per_sample - 1)
    return Blocks(
        first_item=pieces.item[first],
        first_offset=pieces.offset[first],
        last_item=pieces.item[last],
        last_end=pieces.offset[last] + pieces.sizes[last] - pieces.is_cut[last],
        sizes=1 + end_of_tokens[last] - end_of_tokens[first] + pieces.sizes[first],
    )


@dataclass(frozen=True)
class _Pieces:
    """The pieces to pack: items, over-long ones cut. `sizes` counts the ``</s>`` that is added after a cut piece."""

    item: np.ndarray
    offset: np.ndarray
    sizes: np.ndarray
    is_cut: np.ndarray
    is_text: np.ndarray


def _cut_pieces(item_sizes: np.ndarray, piece_size: int) -> _Pieces:
    is_text = item_sizes > 1
    repeated_boundary = ~is_text & np.concatenate([[False], ~is_text[:-1]])
    # An item of piece_size + 1 tokens, its own </s> among them, still fills a block exactly and stays whole.
    counts = np.where(item_sizes > piece_size + 1, -(-(item_sizes - 1) // piece_size), 1)
    counts[repeated_boundary] = 0
    item = np.repeat(np.arange(len(item_sizes), dtype=np.int32), counts)
    first_piece = np.cumsum(counts, dtype=np.int32) - counts
    number = np.arange(len(item), dtype=np.int32) - first_piece[item]  # of the piece in its item
    offset = number * np.int32(piece_size)
    is_cut = number < counts[item] - 1
    sizes = np.where(is_cut, np.int32(piece_size + 1), item_sizes[item] - offset)
    return _Pieces(item, offset, sizes, is_cut, is_text[item])


def _greedy_runs(end_of_tokens: np.ndarray, is_text: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last piece of each run of at most `capacity` tokens; both are text, boundaries at the ends drop out.

    One Python step per run, and no array larger than the arguments: 16 GB of text have some 10^8 pieces and 10^7 runs.
    """
    first, last = [], []
    start = 0
    while start < len(is_text):
        if not is_text[start]:  # never two in a row
            start += 1
            continue
        limit = (end_of_tokens[start - 1] if start else 0) + capacity
        window = end_of_tokens[start : start + capacity + 1]  # a piece has a token at least
        stop = start + int(window.searchsorted(limit, side="right"))
        assert stop > start, "no piece is longer than a run"
        first.append(start)
        last.append(stop - 1 if is_text[stop - 1] else stop - 2)
        start = stop
    return np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)
