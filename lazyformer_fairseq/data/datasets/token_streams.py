"""One long text as contiguous streams, a row of a batch each, cut into segments (Transformer-XL, section 3.2)."""

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
    """Options of the way in which a language model reads a text."""

    tgt_len: int = option(192, "tokens of a segment, predicted in one forward pass", bounds=LENGTH)
    valid_tgt_len: Optional[int] = option(
        None,
        "tokens of a segment in validation; default: as in training",
        bounds=LENGTH,
    )
    roll: bool = option(False, "each epoch, streams start at places drawn anew")


def open_tokens(prefix: Union[str, Path]) -> np.ndarray:
    """Return all ids of PREFIX.bin in their order: (N,), memory-mapped, never copied as a whole.

    Raises a UserError where the files are missing or damaged, or hold no token.
    """
    index = read_index(prefix)
    if not index.bytes:
        raise UserError(f"{prefix}.bin: holds no token; was the corpus empty?")
    return np.memmap(index.check_data(), dtype=index.dtype, mode="r")


@dataclass(eq=False, repr=False)
class TokenStreams(Dataset):
    """Cuts tokens into as many streams as a batch has rows; item i is the batch of all streams' segment i.

    Row r holds a contiguous part of the text, row r + 1 the part after it. Every target's source is the token before
    it in the text; for a row's first target it is the last token of the row before. The very first token is predicted
    from ``</s>``, so every token is a target.

    Args:
        tokens: (N,) ids, of any integer type; a memory map stays on disk.
        rows: streams of all workers together.
        tgt_len: T, tokens of a segment; the last one may be shorter.
        eos: id of ``</s>``.
        pad: id that fills targets where a row is shorter than another.
        shards: workers; each has ``rows / shards`` consecutive rows.
        shard: number of this worker, from 0.
        keeps_rest: what happens to the N mod `rows` tokens that do not divide. False (training): the last ones are
            left out. True (evaluation): the first rows have one more token, the others end in one `pad`.
        roll: each stream starts at a place of its own, drawn anew, and what is before it comes in the end; for training
            alone.
        seed: what is drawn depends on it and the epoch alone.
        epoch: number of the epoch, from 1.

    Attributes:
        longest: tokens of the longest row of all workers.

    Raises:
        UserError: `rows` or `tgt_len` are not positive; without `keeps_rest` also where a row would be shorter than a
            segment.
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
                    f"{len(self.tokens)} tokens in {self.rows} rows (batch size x workers) are {each} a row, but a "
                    f"segment is {self.tgt_len} (--tgt-len); give smaller ones, or more text"
                )
        own = np.arange(self.rows)[self.own_rows]
        self.starts = own * each + np.minimum(own, rest)
        self.lengths = each + (own < rest)
        self.longest = each + (rest > 0)
        self.shifts = np.zeros(len(own), np.int64)
        self.set_epoch(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, which draws the places where rolled streams start."""
        self.epoch = epoch
        if self.roll:
            random = np.random.default_rng((self.seed, epoch, 0))
            self.shifts = random.integers(self.longest, size=self.rows)[self.own_rows]

    def ordered_indices(self) -> np.ndarray:
        """Return the segments in order."""
        return np.arange(len(self))

    def batch_by_size(self, indices: np.ndarray, *limits: Optional[int]) -> list[np.ndarray]:
        """Return one segment per batch, as a segment is a batch already; the limits of a batch do not apply."""
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
        """Return a batch of this worker's B rows; sources and targets (B, T)."""
        if not 0 <= segment < len(self):
            raise IndexError(segment)
        start = segment * self.tgt_len
        place_T = np.arange(start, min(start + self.tgt_len, self.longest))
        is_there_BT = place_T < self.lengths[:, None]
        # Where in the text they are; after a stream's end comes its start, if it is rolled.
        at_BT = self.starts[:, None] + (place_T + self.shifts[:, None]) % np.maximum(self.lengths[:, None], 1)
        at_BT = np.minimum(at_BT, len(self.tokens) - 1)
        before_BT = np.where(at_BT == 0, self.eos, self.tokens[at_BT - 1])
        source, target = (
            torch.from_numpy(np.where(is_there_BT, tokens_BT, self.pad).astype(np.int64))
            for tokens_BT in (before_BT, self.tokens[at_BT])
        )
        return _batch(segment, source, target, self.pad)

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the item, which is a batch already."""
        (sample,) = samples
        return sample


@dataclass(eq=False, repr=False)
class TokenItems(TokenStreams):
    """Batches of items that know nothing of each other, such as images: a row each, predicted from ``</s>`` on.

    Arguments as of :class:`TokenStreams`; `tgt_len` are the tokens of an item, and rows of a batch are neighbours. In
    training they come in an order of each epoch's own, of its seed and number, and the last ones that fill no batch
    are left out. With `keeps_rest` they come in theirs, and rows of `pad` fill the last batch.
    """

    def __post_init__(self) -> None:
        count = len(self.tokens) // self.tgt_len
        self.items = self.tokens[: count * self.tgt_len].reshape(count, self.tgt_len)
        self.longest = self.tgt_len
        if self.rows < 1 or (count < self.rows and not self.keeps_rest):
            raise UserError(f"{count} images in batches of {self.rows} (batch size x workers); give smaller ones")
        self.set_epoch(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, which draws its own order for training."""
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
    """Return tokens as streams, or as items, for all who train on them or measure them.

    Args:
        tokens: ids of the text, (N,).
        tgt_len: tokens per segment.
        item: tokens of an item, :func:`item_length`; 0 for a text.
        **how: further arguments of :class:`TokenStreams`.

    Raises:
        UserError: segments are no items; as these classes do.
    """
    if item and tgt_len != item:
        raise UserError(f"--tgt-len {tgt_len}: these images have {item} pixels, all predicted at once; give {item}")
    dataset_class = TokenStreams
    if item:
        dataset_class = TokenItems
    return dataset_class(tokens, tgt_len=tgt_len, **how)


def item_length(folder: Union[str, Path]) -> int:
    """Return the tokens per item of a prepared folder of independent items; 0 if it holds a text."""
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
    """The segments of streams in order, epoch after epoch, as fairseq-train reads them; every one is a whole batch.

    Args:
        streams: the streams of this process.
    """

    def __init__(self, streams: TokenStreams):
        super().__init__(streams, batch_size=1, shuffle=False)

    def _dealt(self, batches: list[np.ndarray]) -> list[np.ndarray]:
        """Return all segments: each process reads its own streams."""
        return batches

    def _consumed(self) -> int:
        return 1

    def _after(self) -> int:
        """Segments keep their order, but another epoch cuts other ones."""
        return self.epoch + 1


def check_memory_fits(mem_len: int, streams: TokenStreams) -> None:
    """Raise a UserError where a stream ends before its memory is full, or is an image."""
    if mem_len and isinstance(streams, TokenItems):
        raise UserError(f"--mem-len {mem_len}: an image remembers no other one; give --mem-len 0")
    if mem_len + streams.tgt_len > streams.longest:
        raise UserError(
            f"--mem-len {mem_len}: with segments of {streams.tgt_len} tokens (--tgt-len) it is longer than a stream, "
            f"which has {streams.longest}; give a smaller one, or fewer rows (--batch-size)"
        )


def shape_of(streams: TokenStreams, mem_len: int, options: StreamOptions) -> dict[str, Union[int, str]]:
    """Return what a memory must fit: tokens of the text, rows of all workers, tokens of segment and memory.

    It also says whether streams are rolled.
    """
    return {
        "tokens": len(streams.tokens),
        "rows": streams.rows,
        "tgt_len": streams.tgt_len,
        "mem_len": mem_len,
        "roll": options.roll,
    }
