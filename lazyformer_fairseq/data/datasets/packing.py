"""FULL-SENTENCES packing (RoBERTa, Liu et al. 2019, section 4.2): whole sentences, across document boundaries.

Input is fairseq-preprocess's format: one sentence an item, ending ``</s>``; a document boundary is an item of ``</s>``
alone. A block is what the model reads, ``<s> s1 </s> s2 </s> </s> s3 </s>``: the extra ``</s>`` stands between
documents, so never at a block's start or end.
"""

import hashlib
import logging
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple, Optional, Union

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import atomic_file, remove_leftovers

logger = logging.getLogger(__name__)

ITEMS_AT_ONCE = 1 << 20  # packed in one go; bounds the memory
WORTH_KEEPING = 1 << 20  # items; fewer are packed in a fraction of a second


@dataclass(frozen=True)
class Blocks:
    """Where each block starts and ends: arrays of one number per block, int32.

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


def kept_blocks(prefix: Union[str, Path], item_sizes: np.ndarray, tokens_per_sample: int) -> Blocks:
    """:func:`pack_full_sentences` for PREFIX.bin; of a large one mapped from a file beside it, which is made once.

    All processes share the file's memory. It is named after the sizes, so other data never reads it. Where the folder
    cannot be written, each packs for itself.
    """
    if len(item_sizes) < WORTH_KEEPING or not Path(f"{prefix}.idx").is_file():
        return pack_full_sentences(item_sizes, tokens_per_sample)
    digest = hashlib.sha256(np.ascontiguousarray(item_sizes)).hexdigest()[:16]
    path = Path(f"{prefix}.blocks{tokens_per_sample}-{digest}.npy")
    if (kept := _mapped(path, len(item_sizes), tokens_per_sample)) is not None:
        return kept
    blocks = pack_full_sentences(item_sizes, tokens_per_sample)
    try:
        remove_leftovers(path.parent, path.name)
        with atomic_file(path, durable=False) as file:
            np.save(file, np.stack(astuple(blocks)))
    except OSError as error:
        logger.info("%s: cannot be written (%s), so each process packs for itself", path, error.strerror)
        return blocks
    return _mapped(path, len(item_sizes), tokens_per_sample) or blocks


def _mapped(path: Path, items: int, tokens_per_sample: int) -> Optional[Blocks]:
    """The blocks in a file; None where it is not there, or damaged."""
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy may raise anything for a damaged header
        logger.warning("%s: damaged, is written anew (%s)", path, error)
        return None
    if rows.dtype == np.int32 and rows.ndim == 2 and len(rows) == 5 and rows.size:
        blocks = Blocks(*map(np.asarray, rows))
        follow = (np.diff(blocks.first_item) >= 0).all() and (blocks.first_item <= blocks.last_item).all()
        inside = rows.min() >= 0 and blocks.last_item[-1] < items and (np.diff(blocks.last_item) >= 0).all()
        if follow and inside and blocks.sizes.max() <= tokens_per_sample:
            return blocks
    logger.warning("%s: damaged, is written anew", path)
    return None


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
    found, start, count = [np.empty((5, 0), np.int32)], 0, ITEMS_AT_ONCE
    while start < len(item_sizes):
        rows = _pack(np.asarray(item_sizes[start : start + count], dtype=np.int32), tokens_per_sample)
        rows[[0, 2]] += start  # first_item, last_item
        start_of_next = len(item_sizes)
        if start + count < len(item_sizes):  # the last block may go on: start the next piece at an item that starts one
            starts = np.flatnonzero(rows[1] == 0)  # first_offset
            if not len(starts) or not starts[-1]:
                count *= 2
                continue
            start_of_next, rows = int(rows[0, starts[-1]]), rows[:, : starts[-1]]
        found.append(rows)
        start = start_of_next
    return Blocks(*np.concatenate(found, axis=1))


def _pack(item_sizes: np.ndarray, tokens_per_sample: int) -> np.ndarray:
    """The numbers of :class:`Blocks`, in its order, (5, blocks)."""
    pieces = _cut_pieces(item_sizes, tokens_per_sample - 2)
    ends = np.cumsum(pieces.sizes, dtype=np.int64)
    first, last = _greedy_runs(ends, ends - pieces.sizes, pieces.is_text, tokens_per_sample - 1)
    return np.stack(
        [
            pieces.item[first],
            pieces.offset[first],
            pieces.item[last],
            pieces.offset[last] + pieces.sizes[last] - pieces.is_cut[last],
            1 + ends[last] - ends[first] + pieces.sizes[first],
        ]
    ).astype(np.int32)


class _Pieces(NamedTuple):
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


def _greedy_runs(
    ends: np.ndarray, starts: np.ndarray, is_text: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """First and last piece of each run of at most `capacity` tokens; both are text, boundaries at the ends drop out.

    Args:
        ends, starts: tokens before the end and before the start of each piece.
    """
    stops = np.searchsorted(ends, starts + capacity, side="right")  # of a run that starts at each piece
    assert (stops > np.arange(len(stops))).all(), "no piece is longer than a run"
    is_boundary = np.append(~is_text, False)
    next_text = (stops + is_boundary[stops]).tolist()  # never two boundaries in a row
    first, piece = [], int(is_boundary[0])
    while piece < len(next_text):
        first.append(piece)
        piece = next_text[piece]
    first = np.array(first, dtype=np.int64)
    last = stops[first] - 1
    return first, last - is_boundary[last]
