"""One long text as contiguous streams, a row of a batch each, cut into segments (Transformer-XL, section 3.2)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.data.prepared_folder import MANIFEST
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import option
from lazyformer_fairseq.storage.indexed_format import read_index
from lazyformer_fairseq.storage.json_files import read_json


@dataclass
class StreamOptions:
    """Options of the way in which a language model reads a text."""

    tgt_len: int = option(192, "tokens of a segment, predicted in one forward pass")
    valid_tgt_len: Optional[int] = option(None, "tokens of a segment in validation; default: as in training")
    roll: bool = option(False, "each epoch, streams start at places drawn anew")
    varlen: bool = option(False, "segments of random length: most about --tgt-len, one in twenty half")


def open_tokens(prefix: Union[str, Path]) -> np.ndarray:
    """Return all ids of PREFIX.bin in their order: (N,), memory-mapped, never copied as a whole.

    Raises a UserError where the files are missing or damaged, or hold no token.
    """
    index = read_index(prefix)
    if not index.bytes:
        raise UserError(f"{prefix}.bin: holds no token; was the corpus empty?")
    found = Path(f"{prefix}.bin").stat().st_size
    if found != index.bytes:
        raise UserError(f"{prefix}.bin: has {found:,} bytes, {index.bytes:,} by its index; write the data again")
    return np.memmap(f"{prefix}.bin", dtype=index.dtype, mode="r")


class Cut(NamedTuple):
    """The cutting of streams in an epoch, as in Transformer-XL's code at NVIDIA; by default it never changes.

    Attributes:
        roll: each stream starts at a place of its own, drawn anew, and what is before it comes in the end.
        varlen: segments have lengths of their own, drawn anew: :func:`random_lengths`.
        seed, epoch: what is drawn depends on them alone.
    """

    roll: bool = False
    varlen: bool = False
    seed: int = 1
    epoch: int = 1

    def shifts(self, rows: int, length: int) -> np.ndarray:
        """Return (rows,): where each stream starts."""
        if not self.roll:
            return np.zeros(rows, dtype=np.int64)
        return np.random.default_rng((self.seed, self.epoch, 0)).integers(length, size=rows)

    def borders(self, length: int, tgt_len: int) -> np.ndarray:
        """Return (segments + 1,): where segments start, and the streams' end."""
        if not self.varlen:
            return np.append(np.arange(0, length, tgt_len), length)
        lengths = random_lengths(np.random.default_rng((self.seed, self.epoch, 1)), length, tgt_len)
        ends = np.cumsum(lengths)
        return np.concatenate([[0], ends[ends < length], [length]])


EVEN = Cut()


def random_lengths(generator: np.random.Generator, length: int, tgt_len: int) -> np.ndarray:
    """Lengths of more segments than fill `length` tokens, as ``get_varlen_iter`` of Transformer-XL's code draws them.

    Rounded down from N(tgt_len, 5), one in twenty from N(tgt_len / 2, 5); from 5 to tgt_len + 15.
    """
    count = length // 5 + 1
    means = np.where(generator.random(count) < 0.95, tgt_len, tgt_len / 2)
    return np.clip(generator.normal(means, 5).astype(np.int64), 5, tgt_len + 15)


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
        cut: of this epoch; other than the default for training alone.
        keeps_rest: what happens to the N mod `rows` tokens that do not divide. False (training): the last ones are
            left out. True (evaluation): the first rows have one more token, the others end in one `pad`.

    Raises:
        UserError: `rows` or `tgt_len` are not positive; without `keeps_rest` also where a row would be shorter than a
            segment.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        rows: int,
        tgt_len: int,
        eos: int,
        pad: int,
        shards: int = 1,
        shard: int = 0,
        keeps_rest: bool = False,
        cut: Cut = EVEN,
    ):
        assert not (keeps_rest and cut.roll), "only streams of equal length are rolled"
        assert rows % shards == 0 and 0 <= shard < shards, (rows, shards, shard)
        if rows < 1 or tgt_len < 1:
            raise UserError(f"{rows} rows of segments of {tgt_len} tokens (--tgt-len): both must be positive")
        each, rest = divmod(len(tokens), rows)
        if not keeps_rest and each < tgt_len:
            raise UserError(
                f"{len(tokens)} tokens in {rows} rows (batch size x workers) are {each} a row, but a segment is "
                f"{tgt_len} (--tgt-len); give smaller ones, or more text"
            )
        self.rows_of_shard = rows // shards
        own = shard * self.rows_of_shard + np.arange(self.rows_of_shard)
        if keeps_rest:
            more = np.minimum(own, rest)
        else:
            more = 0 * own
        self.starts = own * each + more
        self.lengths = np.full(len(own), each) + (own < rest if keeps_rest else 0)
        self.longest = each + (1 if keeps_rest and rest else 0)  # of the rows of all workers
        self.shifts = cut.shifts(rows, max(1, each))[own]
        self.borders = cut.borders(self.longest, tgt_len)
        self.tokens = tokens
        self.rows = rows
        self.shard = shard
        self.tgt_len = tgt_len
        self.eos = eos
        self.pad = pad

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __getitem__(self, segment: int) -> dict[str, Any]:
        """Return a batch of this worker's B rows; sources and targets (B, T)."""
        if not 0 <= segment < len(self):
            raise IndexError(segment)
        start, end = (int(border) for border in self.borders[segment : segment + 2])
        rows = len(self.starts)
        source, target = (torch.full((rows, end - start), self.pad) for _ in range(2))
        for row in range(rows):
            filled = 0
            for first, last in self._stretches(row, start, end):
                self._fill(source[row, filled:], target[row, filled:], first, last)
                filled += last - first
        return _batch(segment, source, target, self.pad)

    def _stretches(self, row: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield where places `start` to `end` of a stream of this worker are in the text: two parts around its end."""
        first, length, shift = (int(each[row]) for each in (self.starts, self.lengths, self.shifts))
        end = min(end, length)
        turn = length - shift  # the place where it goes on with its first token
        for low, high, offset in (
            (start, min(end, turn), shift),
            (max(start, turn), end, -turn),
        ):
            if low < high:
                yield first + low + offset, first + high + offset

    def _fill(self, source_T: Tensor, target_T: Tensor, start: int, end: int) -> None:
        """Fill a row with the targets ``tokens[start:end]``, of which there are some; the rest stays as it is."""
        before = max(start - 1, 0)
        text = torch.from_numpy(self.tokens[before:end].astype(np.int64))
        target_T[: end - start] = text[start - before :]
        source_T[0] = text[0] if start else self.eos
        source_T[1 : end - start] = target_T[: end - start - 1]

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an item is a batch already."""
        (sample,) = samples
        return sample


class TokenItems(TokenStreams):
    """Batches of items that know nothing of each other, such as images: a row each, predicted from ``</s>`` on.

    In training they come in an order of each epoch's own, of its seed and number, and the last ones that fill no batch
    are left out. With `keeps_rest` they come in theirs, and rows of `pad` fill the last batch.

    Args:
        tokens, rows, eos, pad, shards, shard, keeps_rest: as of :class:`TokenStreams`; rows of a batch are neighbours.
        tgt_len: T, tokens of an item.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        rows: int,
        tgt_len: int,
        eos: int,
        pad: int,
        shards: int = 1,
        shard: int = 0,
        keeps_rest: bool = False,
        cut: Cut = EVEN,
    ):
        self.items = tokens[: len(tokens) - len(tokens) % tgt_len].reshape(-1, tgt_len)
        if rows < 1 or (len(self.items) < rows and not keeps_rest):
            raise UserError(f"{len(self.items)} images in batches of {rows} (batch size x workers); give smaller ones")
        if cut.varlen:
            raise UserError("--varlen: is for streams of text; images are read whole")
        order = np.arange(len(self.items))
        if keeps_rest:
            order = np.pad(order, (0, -len(order) % rows), constant_values=-1)
        else:
            order = np.random.default_rng((cut.seed, cut.epoch, 2)).permutation(order)
        self.order = order[: len(order) - len(order) % rows].reshape(-1, rows)
        self.tokens = tokens
        self.rows = rows
        self.tgt_len = tgt_len
        self.longest = tgt_len
        self.rows_of_shard = rows // shards
        self.shard = shard
        self.eos = eos
        self.pad = pad

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, segment: int) -> dict[str, Any]:
        if not 0 <= segment < len(self):
            raise IndexError(segment)
        own = self.order[segment, self.shard * self.rows_of_shard :][: self.rows_of_shard]
        target = torch.from_numpy(self.items[own].astype(np.int64))
        target[torch.from_numpy(own < 0)] = self.pad
        source = torch.cat([torch.full_like(target[:, :1], self.eos), target[:, :-1]], 1)
        return _batch(segment, source, target, self.pad)


def cut_tokens(
    tokens: np.ndarray,
    rows: int,
    tgt_len: int,
    eos: int,
    pad: int,
    item: int = 0,
    **how: Any,
) -> TokenStreams:
    """Return tokens as streams, or as items, for all who train on them or measure them.

    Args:
        tokens: ids of the text, (N,).
        rows: streams of all workers together.
        tgt_len: tokens per segment.
        eos: id of ``</s>``.
        pad: id that fills targets.
        item: tokens of an item, :func:`item_length`; 0 for a text.
        how: further arguments of :class:`TokenStreams`.

    Raises:
        UserError: segments are no items; as these classes do.
    """
    if item and tgt_len != item:
        raise UserError(f"--tgt-len {tgt_len}: these images have {item} pixels, all predicted at once; give {item}")
    return (TokenItems if item else TokenStreams)(tokens, rows, tgt_len, eos, pad, **how)


def item_length(folder: Union[str, Path]) -> int:
    """Return the tokens per item of a prepared folder of independent items; 0 if it holds a text."""
    manifest = Path(folder) / MANIFEST
    if manifest.is_file():
        return int(read_json(manifest).get("item", 0))
    return 0


def _batch(segment: int, source: Tensor, target: Tensor, pad: int) -> dict[str, Any]:
    counts = {
        "segment": segment,
        "nsentences": len(source),
        "ntokens": int(target.ne(pad).sum()),
    }
    place = torch.full((len(source),), segment)
    return {
        "id": place,
        **counts,
        "net_input": {"src_tokens": source},
        "target": target,
    }


class EpochSegments(EpochBatches):
    """The segments of streams in order, epoch after epoch, as fairseq-train reads them; every one is a whole batch.

    Args:
        tokens, rows, tgt_len, eos, pad, item, shard, shards: as of :func:`cut_tokens`.
        cut: of every epoch, but for its number.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        rows: int,
        tgt_len: int,
        eos: int,
        pad: int,
        cut: Cut = EVEN,
        item: int = 0,
        shard: int = 0,
        shards: int = 1,
    ):
        how = {"item": item, "shard": shard, "shards": shards}
        self._streams = lambda epoch: cut_tokens(tokens, rows, tgt_len, eos, pad, cut=cut._replace(epoch=epoch), **how)
        super().__init__(self._streams(1), batch_size=1, shuffle=False)

    @property
    def indices(self) -> list[np.ndarray]:
        """Numbers of the segments of the epoch, a batch each."""
        if self._batches[0] != self.epoch:
            self.dataset = self._streams(self.epoch)
            self._batches = (
                self.epoch,
                [np.array([segment]) for segment in range(len(self.dataset))],
            )
        return self._batches[1]

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

    It also names how epochs cut the streams.
    """
    sizes = {
        "tokens": len(streams.tokens),
        "rows": streams.rows,
        "tgt_len": streams.tgt_len,
    }
    cut = ", ".join(name for name in ("roll", "varlen") if getattr(options, name))
    return {**sizes, "mem_len": mem_len, "cut": cut}
