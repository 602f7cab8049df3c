"""A long text as contiguous streams, one per row of a batch, cut into segments (Transformer-XL, section 3.2)."""

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
    """Options for how a language model reads a text."""

    tgt_len: int = option(192, "tokens in a segment, which are predicted in one forward pass", bounds=LENGTH)
    valid_tgt_len: Optional[int] = option(
        None,
        "tokens in a segment in validation; default: as in training",
        bounds=LENGTH,
    )
    roll: bool = option(False, "start streams at new random places in each epoch")


def open_tokens(prefix: Union[str, Path]) -> np.ndarray:
    """Return all ids of PREFIX.bin in their order: (N,), memory-mapped.

    Raises:
        UserError: the files are missing or damaged, or contain no tokens.
    """
    index = read_index(prefix)
    if not index.bytes:
        raise UserError(f"{prefix}.bin: contains no tokens; was the corpus empty?")
    return np.memmap(index.check_data(), dtype=index.dtype, mode="r")


@dataclass(eq=False, repr=False)
class TokenStreams(Dataset):
    """A text that is cut into as many streams as a batch has rows; item i is the batch of segment i of all streams.

    Row r has a contiguous part of the text, and row r + 1 has the part after it. The source of every target is the
    token before it in the text; for the first target of a row, it is the last token of the row before. The very first
    token is predicted from ``</s>``, so every token is a target.

    Args:
        tokens: ids (N,) of any integer type; a memory map stays on disk.
        rows: number of streams of all workers together.
        tgt_len: T, the number of tokens in a segment; the last segment may be shorter.
        eos: id of ``</s>``.
        pad: id that fills targets if a row is shorter than another.
        shards: number of workers; each has ``rows / shards`` consecutive rows.
        shard: number of this worker, from 0.
        keeps_rest: what happens to the N mod `rows` tokens that remain. False (training): the last tokens are left out.
            True (evaluation): the first rows have one more token, and the other rows end with one `pad`.
        roll: whether each stream starts at a random place, drawn anew in each epoch, and ends with what comes before
            that place; only for training.
        seed: the places depend only on it and the epoch.
        epoch: number of the epoch, from 1.

    Attributes:
        longest: number of tokens in the longest row of all workers.

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
                    f"segment has {self.tgt_len} (--tgt-len); give fewer rows, shorter segments or more text"
                )
        own = np.arange(self.rows)[self.own_rows]
        self.starts = own * each + np.minimum(own, rest)
        self.lengths = each + (own < rest)
        self.longest = each + (rest > 0)
        self.shifts = np.zeros(len(own), np.int64)
        self.set_epoch(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, and draw the places at which rolled streams start."""
        self.epoch = epoch
        if self.roll:
            random = np.random.default_rng((self.seed, epoch, 0))
            self.shifts = random.integers(self.longest, size=self.rows)[self.own_rows]

    def ordered_indices(self) -> np.ndarray:
        """Return the segments in order."""
        return np.arange(len(self))

    def batch_by_size(self, indices: np.ndarray, *limits: Optional[int]) -> list[np.ndarray]:
        """Return one segment per batch; no limits apply, because a segment is already a batch."""
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
        """Return the batch of a segment for the B rows of this worker, with sources and targets (B, T)."""
        if not 0 <= segment < len(self):
            raise IndexError(segment)
        start = segment * self.tgt_len
        place_T = np.arange(start, min(start + self.tgt_len, self.longest))
        is_there_BT = place_T < self.lengths[:, None]
        # Places in the text; the end of a rolled stream is followed by its start.
        at_BT = self.starts[:, None] + (place_T + self.shifts[:, None]) % np.maximum(self.lengths[:, None], 1)
        at_BT = np.minimum(at_BT, len(self.tokens) - 1)
        before_BT = np.where(at_BT == 0, self.eos, self.tokens[at_BT - 1])
        source, target = (
            torch.from_numpy(np.where(is_there_BT, tokens_BT, self.pad).astype(np.int64))
            for tokens_BT in (before_BT, self.tokens[at_BT])
        )
        return _batch(segment, source, target, self.pad)

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the item, which is already a batch."""
        (sample,) = samples
        return sample


@dataclass(eq=False, repr=False)
class TokenItems(TokenStreams):
    """Batches of independent items, such as images, with one item per row, which is predicted from ``</s>`` on.

    The arguments are those of :class:`TokenStreams`, where `tgt_len` is the number of tokens in an item. In training,
    items come in a random order that depends on the seed and the epoch, and the last ones that do not fill a batch are
    left out. With `keeps_rest`, they come in their own order, and rows of `pad` fill the last batch.
    """

    def __post_init__(self) -> None:
        count = len(self.tokens) // self.tgt_len
        self.items = self.tokens[: count * self.tgt_len].reshape(count, self.tgt_len)
        self.longest = self.tgt_len
        if self.rows < 1 or (count < self.rows and not self.keeps_rest):
            raise UserError(f"{count} images in batches of {self.rows} (batch size x workers); give smaller batches")
        self.set_epoch(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; in training, draw its order."""
        self.epoch = epoch
        order = np.arange(len(self.items))
        if self.keeps_rest:
            order = np.pad(order, (0, -len(order) % self.rows), constant_values=-1)
        else:
            order = np.random.default_rng((self.seed, epoch, 2)).permutation(order)
        self.order = order[: len(order) - len(order) % self.rows].reshape(-1, self.rows)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, segment: int) -> dict[str, Any]:
        if not 0 <= segment < len(self):
            raise IndexError(segment)
        own = self.order[segment, self.own_rows]
        target = torch.from_numpy(self.items[own].astype(np.int64))
        target[torch.from_numpy(own < 0)] = self.pad
        source = torch.cat([torch.full_like(target[:, :1], self.eos), target[:, :-1]], 1)
        return _batch(segment, source, target, self.pad)


def cut_tokens(tokens: np.ndarray, tgt_len: int, item: int = 0, **how: Any) -> TokenStreams:
    """Return tokens as streams of a text or as batches of independent items.

    Args:
        tokens: the ids, (N,).
        tgt_len: number of tokens per segment.
        item: number of tokens per item, see :func:`item_length`; 0 for a text.
        **how: further arguments of :class:`TokenStreams`.

    Raises:
        UserError: a segment is not an item, or for the reasons of these classes.
    """
    if item and tgt_len != item:
        raise UserError(f"--tgt-len {tgt_len}: these images have {item} pixels, all predicted at once; give {item}")
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
    """The segments of streams in order, epoch after epoch, as fairseq-train reads them; each is a whole batch.

    Args:
        streams: the streams of this process.
    """

    def __init__(self, streams: TokenStreams):
        super().__init__(streams, batch_size=1, shuffle=False)

    def _dealt(self, batches: list[np.ndarray]) -> list[np.ndarray]:
        """Return all segments, because each process reads its own streams."""
        return batches

    def _consumed(self) -> int:
        return 1

    def _after(self) -> int:
        """Return the next epoch, even though segments keep their order: each epoch may cut other segments."""
        return self.epoch + 1


def check_memory_fits(mem_len: int, streams: TokenStreams) -> None:
    """Raise a UserError if a stream ends before its memory is full, or if there is a memory for images."""
    if mem_len and isinstance(streams, TokenItems):
        raise UserError(f"--mem-len {mem_len}: images are independent and need no memory; give --mem-len 0")
    if mem_len + streams.tgt_len > streams.longest:
        raise UserError(
            f"--mem-len {mem_len}: with segments of {streams.tgt_len} tokens (--tgt-len) it is longer than a stream, "
            f"which has {streams.longest} tokens; give a smaller memory, or fewer rows (--batch-size)"
        )


def shape_of(streams: TokenStreams, mem_len: int, options: StreamOptions) -> dict[str, Union[int, str]]:
    """Return the sizes that a memory must fit, and whether streams are rolled.

    The sizes are the tokens of the text, the rows of all workers, and the tokens of a segment and of the memory.
    """
    return {
        "tokens": len(streams.tokens),
        "rows": streams.rows,
        "tgt_len": streams.tgt_len,
        "mem_len": mem_len,
        "roll": options.roll,
    }
