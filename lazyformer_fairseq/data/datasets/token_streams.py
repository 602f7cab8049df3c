"""Contiguous token streams for causal LMs, one per batch row, split into segments (Transformer-XL, section 3.2)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.data.prepared_folder import MANIFEST
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import LENGTH, option
from lazyformer_fairseq.storage.indexed_format import read_index
from lazyformer_fairseq.storage.json_files import read_json


@dataclass
class StreamOptions:
    """Options for splitting a text into the segments that a causal language model reads."""

    tgt_len: int = option(192, "tokens per segment, which are predicted in one forward pass", bounds=LENGTH)
    valid_tgt_len: Optional[int] = option(
        None,
        "tokens per segment during validation; default: --tgt-len",
        bounds=LENGTH,
    )
    roll: bool = option(False, "start streams at new random positions in each epoch")


def open_tokens(prefix: Union[str, Path]) -> np.ndarray:
    """Memory-map all ids of PREFIX.bin in order, (N,).

    Raises:
        UserError: the files are missing or damaged, or contain no tokens.
    """
    index = read_index(prefix)
    if not index.bytes:
        raise UserError(f"{prefix}.bin contains no tokens; was the corpus empty?")
    return np.memmap(index.check_data(), dtype=index.dtype, mode="r")


@dataclass(eq=False, repr=False)
class TokenStreams(Dataset):
    """A text split into one stream per batch row; item i is the batch with segment i of all streams.

    Rows are contiguous parts of the text, in order. The source of every target is the preceding token in the text; for
    the first target of a row, this is the last token of the previous row. The first token of the text is predicted from
    ``</s>``, so every token is a target.

    Args:
        tokens: ids (N,) of any integer type; a memory map stays on disk.
        rows: number of streams over all workers.
        tgt_len: number of tokens T per segment; the last segment may be shorter.
        eos: id of ``</s>``.
        pad: id that pads targets in rows that are shorter than others.
        shards: number of workers; each one reads ``rows / shards`` consecutive rows.
        shard: rank of this worker, from 0.
        keeps_rest: whether to keep the remaining N mod `rows` tokens. If False (training), they are dropped. If True
            (evaluation), each of the first rows has one more token, and each of the others ends with one `pad`.
        roll: whether to rotate each stream by a random offset in each epoch; only for training.
        seed: random seed, which together with the epoch determines the offsets.
        epoch: current epoch, from 1.

    Attributes:
        longest: number of tokens in the longest row over all workers.

    Raises:
        UserError: `rows` or `tgt_len` is not positive or, without `keeps_rest`, a row would be shorter than a segment.
    """

    tokens: np.ndarray
    rows: int
    tgt_len: int
    eos: int
    pad: int
    shards: int = 1
    shard: int = 0
    keeps_rest: bool = False
    roll: bool = False
    seed: int = 1
    epoch: int = 1

    def __post_init__(self) -> None:
        assert not (self.keeps_rest and self.roll), "only streams of equal length are rolled"
        assert self.rows % self.shards == 0, (self.rows, self.shards)
        if self.rows < 1 or self.tgt_len < 1:
            raise UserError(f"{self.rows} rows of segments of {self.tgt_len} tokens (--tgt-len): both must be positive")
        each, rest = divmod(len(self.tokens), self.rows)
        if not self.keeps_rest:
            rest = 0
            if each < self.tgt_len:
                raise UserError(
                    f"{len(self.tokens)} tokens in {self.rows} rows (batch size x workers) are {each} per row, but a "
                    f"segment has {self.tgt_len} (--tgt-len); use fewer rows, shorter segments or more text"
                )
        own = np.arange(self.rows)[self.own_rows]
        self.starts = own * each + np.minimum(own, rest)
        self.lengths = each + (own < rest)
        self.longest = each + (rest > 0)
        self.shifts = np.zeros(len(own), np.int64)
        self.set_epoch(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch and draw the random offsets of rolled streams."""
        self.epoch = epoch
        if self.roll:
            random = np.random.default_rng((self.seed, epoch, 0))
            self.shifts = random.integers(self.longest, size=self.rows)[self.own_rows]

    def ordered_indices(self) -> np.ndarray:
        """Return the segment indices in order."""
        return np.arange(len(self))

    def batch_by_size(self, indices: np.ndarray, *limits: Optional[int]) -> list[np.ndarray]:
        """Return one segment per batch; size limits do not apply, because a segment is already a batch."""
        assert limits == (None, 1), limits
        return np.split(indices, len(indices))

    @property
    def own_rows(self) -> slice:
        """The rows of this worker."""
        count = self.rows // self.shards
        return slice(self.shard * count, (self.shard + 1) * count)

    def __len__(self) -> int:
        return len(range(0, self.longest, self.tgt_len))

    def __getitem__(self, segment: int) -> dict[str, Any]:
        """Return a segment's batch for the B rows of this worker, with sources and targets (B, T)."""
        if not 0 <= segment < len(self):
            raise IndexError(segment)
        start = segment * self.tgt_len
        place_T = np.arange(start, min(start + self.tgt_len, self.longest))
        lengths_B1 = self.lengths[:, None]
        is_there_BT = place_T < lengths_B1
        in_stream_BT = (place_T + self.shifts[:, None]) % np.maximum(lengths_B1, 1)  # rolled streams wrap around
        in_text_BT = np.minimum(self.starts[:, None] + in_stream_BT, len(self.tokens) - 1)

        before_BT = np.where(in_text_BT == 0, self.eos, self.tokens[in_text_BT - 1])
        source_BT = np.where(is_there_BT, before_BT, self.pad).astype(np.int64)
        target_BT = np.where(is_there_BT, self.tokens[in_text_BT], self.pad).astype(np.int64)
        return _batch(segment, torch.from_numpy(source_BT), torch.from_numpy(target_BT), self.pad)

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the only sample, which is already a batch."""
        (sample,) = samples
        return sample


@dataclass(eq=False, repr=False)
class TokenItems(TokenStreams):
    """Batches of independent items, such as images, with one item per row; the first token is predicted from ``</s>``.

    See :class:`TokenStreams` for the arguments; `tgt_len` is the number of tokens per item. During training, items are
    shuffled in each epoch, and an incomplete last batch is dropped. With `keeps_rest`, items are in their original
    order, and the last batch is filled with rows of `pad`.
    """

    def __post_init__(self) -> None:
        count = len(self.tokens) // self.tgt_len
        self.items = self.tokens[: count * self.tgt_len].reshape(count, self.tgt_len)
        self.longest = self.tgt_len
        if self.rows < 1 or (count < self.rows and not self.keeps_rest):
            raise UserError(
                f"{count} images do not fill a batch of {self.rows} (batch size x workers); use smaller batches"
            )
        self.set_epoch(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch; during training, shuffle the items."""
        self.epoch = epoch
        order = np.arange(len(self.items))
        if self.keeps_rest:
            missing = -len(order) % self.rows
            order = np.pad(order, (0, missing), constant_values=-1)
        else:
            order = np.random.default_rng((self.seed, epoch, 2)).permutation(order)
        rest = len(order) % self.rows
        self.order = order[: len(order) - rest].reshape(-1, self.rows)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, segment: int) -> dict[str, Any]:
        if not 0 <= segment < len(self):
            raise IndexError(segment)
        own = self.order[segment, self.own_rows]
        target = torch.from_numpy(self.items[own].astype(np.int64))
        target[torch.from_numpy(own < 0)] = self.pad
        first = torch.full_like(target[:, :1], self.eos)
        source = torch.cat([first, target[:, :-1]], 1)
        return _batch(segment, source, target, self.pad)


def make_streams(tokens: np.ndarray, tgt_len: int, item: int = 0, **how: Any) -> TokenStreams:
    """Split tokens into the streams of a text or into batches of independent items.

    Args:
        tokens: ids, (N,).
        tgt_len: number of tokens per segment.
        item: number of tokens per item (see :func:`item_length`); 0 for a text.
        **how: additional arguments of :class:`TokenStreams`.

    Raises:
        UserError: the segment length differs from the item length, or :class:`TokenStreams` or :class:`TokenItems`
            raises an error.
    """
    if item and tgt_len != item:
        raise UserError(f"--tgt-len {tgt_len}: the images have {item} pixels, which form one segment; use {item}")
    dataset_class = TokenStreams
    if item:
        dataset_class = TokenItems
    return dataset_class(tokens, tgt_len=tgt_len, **how)


def item_length(folder: Union[str, Path]) -> int:
    """Return the number of tokens per item in a prepared folder of independent items, or 0 if it contains a text."""
    manifest = Path(folder) / MANIFEST
    if manifest.is_file():
        return int(read_json(manifest).get("item", 0))
    return 0


def _batch(segment: int, source: Tensor, target: Tensor, pad: int) -> dict[str, Any]:
    return {
        "id": torch.full((len(source),), segment),
        "segment": segment,
        "nsentences": len(source),
        "ntokens": int(target.ne(pad).sum()),
        "net_input": {"src_tokens": source},
        "target": target,
    }


class EpochSegments(EpochBatches):
    """A resumable iterator over the segments of streams, in fairseq-train's order; each segment is a batch.

    Args:
        streams: the streams of this process.
    """

    def __init__(self, streams: TokenStreams):
        super().__init__(streams, batch_size=1, shuffle=False)

    def _batches_of_this_process(self, batches: list[np.ndarray]) -> list[np.ndarray]:
        """Return all segments, because each process reads separate streams."""
        return batches

    def _batches_per_step(self) -> int:
        return 1

    def _next_epoch(self) -> int:
        """Return the next epoch; although segments are in order, each epoch may split the streams differently."""
        return self.epoch + 1


def check_memory_fits(mem_len: int, streams: TokenStreams) -> None:
    """Raise a UserError if the memory is longer than a stream allows, or if images are used with a memory."""
    if mem_len and isinstance(streams, TokenItems):
        raise UserError(f"--mem-len {mem_len}: images are independent and need no memory; use --mem-len 0")
    if mem_len + streams.tgt_len > streams.longest:
        raise UserError(
            f"--mem-len {mem_len}: the memory and a segment of {streams.tgt_len} tokens (--tgt-len) exceed the length "
            f"of a stream, which has {streams.longest} tokens; use a smaller memory or fewer rows (--batch-size)"
        )


def memory_settings(streams: TokenStreams, mem_len: int, options: StreamOptions) -> dict[str, Union[int, str]]:
    """Return the settings that a saved memory must match.

    These are the number of tokens in the text, the number of rows over all workers, the segment length, the memory
    length, and whether streams are rolled.
    """
    return {
        "tokens": len(streams.tokens),
        "rows": streams.rows,
        "tgt_len": streams.tgt_len,
        "mem_len": mem_len,
        "roll": options.roll,
    }
