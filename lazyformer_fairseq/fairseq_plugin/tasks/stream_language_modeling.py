"""Task ``stream_language_modeling``: truncated back-propagation through long texts (Transformer-XL, section 3.2).

The text is cut into as many contiguous streams as an update's forward pass has rows, over all workers. A batch is the
next segment of each stream, in order. Nothing is shuffled, and each batch reads the memory of the one before, in the
same update (``--update-freq``) or the last. An epoch starts all streams anew, with empty memory: the text before a
stream's start is the end of the stream above it, which was last seen an epoch ago. Validation has a memory of its own,
empty at its start.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II, MISSING
from torch import Tensor, distributed

from lazyformer_fairseq.data.datasets.token_streams import EVEN, Cut, TokenStreams, open_tokens
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.options import ReliabilityConfig, option
from lazyformer_fairseq.fairseq_plugin.tasks.encoder_task import EncoderTask, dictionary_of
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.storage.indexed_format import check_items

logger = logging.getLogger(__name__)

CHECKPOINT_KEY = "stream_memory"  # in a checkpoint's extra_state


@dataclass
class StreamLanguageModelingConfig(ReliabilityConfig):
    data: str = option(MISSING, "folder that lazyformer lm prepare wrote")
    tgt_len: int = option(192, "tokens of a segment, predicted in one forward pass")
    valid_tgt_len: Optional[int] = option(None, "tokens of a segment in validation; default: as in training")
    roll: bool = option(False, "each epoch, streams start at places drawn anew")
    varlen: bool = option(False, "segments of random length: most about --tgt-len, one in twenty half")
    train_subset: str = II("dataset.train_subset")


Shape = Mapping[str, Union[int, str]]  # what must be equal for a memory to fit, by name


class CarriedMemory:
    """Follows streams from segment to segment. After a jump in the text it starts empty, never with a wrong past.

    Attributes:
        memory: of the segments before `next_segment`.
        next_segment: the segment that reads the memory.
    """

    def __init__(self) -> None:
        self.memory = StreamMemory()
        self.next_segment = 0

    def before(self, segment: int) -> StreamMemory:
        """The memory to read `segment` with: empty at the start of the text (each epoch's) and after a jump."""
        if segment != self.next_segment and segment and self.memory.length:
            logger.warning(
                f"the data continues at segment {segment}, but the memory ends before {self.next_segment}: streams "
                "start with empty memory"
            )
        if segment != self.next_segment or segment == 0:
            self.memory.clear()
        return self.memory

    def has_read(self, segment: int) -> None:
        """Records that the memory holds `segment` too. Numbers that are not finite become 0, for they would spread."""
        self.memory.states = [torch.nan_to_num(state, 0.0, 0.0, 0.0) for state in self.memory.states]
        self.next_segment = segment + 1

    def gather(self, shape: Shape) -> Optional[dict[str, Any]]:
        """Returns what a checkpoint keeps: numbers and tensors (rows of all workers, M, C). All workers must call it.

        Returns:
            None on all workers but the first, and where the workers' memories differ in length.
        """
        states = [state.detach() for state in self.memory.states]
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            lengths: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(lengths, (self.next_segment, self.memory.length))
            if len(set(lengths)) > 1:
                logger.warning("the workers' memories are of different length, so the checkpoint keeps none")
                return None
            states = [_gather_rows(state) for state in states]
            if distributed.get_rank() > 0:
                return None
        return {**shape, "next_segment": self.next_segment, "states": [state.cpu() for state in states]}

    def restore(self, saved: dict[str, Any], shape: Shape, rows: slice) -> None:
        """Takes this worker's `rows` of what :meth:`gather` gave; if that does not fit, warns and stays empty."""
        pairs = {name: (saved.get(name, ""), value) for name, value in shape.items()}
        if odd := [f"{name} {old}, now {new}" for name, (old, new) in pairs.items() if old != new]:
            logger.warning(f"the checkpoint's memory does not fit ({'; '.join(odd)}): streams start with empty memory")
            return self.memory.clear()
        self.memory.load_state_dict({"states": [state[rows].clone() for state in saved["states"]]})
        self.next_segment = saved["next_segment"]
        logger.info("restored a memory of %d tokens a stream from the checkpoint", self.memory.length)


def _gather_rows(state_BMC: Tensor) -> Tensor:
    """On the first worker the rows of all workers, elsewhere its own. Once a sublayer: all may not fit a GPU."""
    world, first = distributed.get_world_size(), distributed.get_rank() == 0
    parts = [torch.empty_like(state_BMC) for _ in range(world)] if first else None
    distributed.gather(state_BMC.contiguous(), parts, dst=0)
    return torch.cat(parts).cpu() if first else state_BMC


class _Text(FairseqDataset):
    """A split that is not cut into streams yet."""

    def __init__(self, split: str, tokens: np.ndarray):
        self.split = split
        self.tokens = tokens


class SegmentIterator(EpochBatchIterator):
    """The segments of streams, in order; every item is a whole batch of this worker.

    A run that resumes with other streams (batch size, workers, segment length) continues after the same share of the
    epoch: the new streams start elsewhere in the text, so that some of it comes twice and some not at all.
    """

    def __init__(self, streams: TokenStreams, **settings: Any):
        super().__init__(
            streams,
            collate_fn=streams.collater,
            batch_sampler=[[segment] for segment in range(len(streams))],
            disable_shuffling=True,
            persistent_workers=False,  # each epoch has an iterator of its own; workers would stay behind
            **settings,
        )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "segments": len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position, segments = state["iterations_in_epoch"], state.get("segments", len(self))
        if position and segments != len(self):
            now = position * len(self) // segments
            logger.warning(
                "the checkpoint is from segment %d of %d and the streams have %d now (another batch size, number of "
                "processes or --tgt-len): continuing at segment %d, some of the text comes twice and some not at all",
                *(position, segments, len(self), now),
            )
            state = {**state, "iterations_in_epoch": now}
        super().load_state_dict(state)


@register_task("stream_language_modeling", dataclass=StreamLanguageModelingConfig)
class StreamLanguageModelingTask(EncoderTask):
    """Cuts texts into streams and keeps their memory between batches; each worker keeps that of its own rows.

    Attributes:
        training, validation: the memories.
        mem_len: the model's, set when it is built.
    """

    cfg: StreamLanguageModelingConfig

    def __init__(self, cfg: StreamLanguageModelingConfig, dictionary: Dictionary):
        super().__init__(cfg, dictionary)
        self.training = CarriedMemory()
        self.validation = CarriedMemory()
        self.mem_len = 0
        self._streams: Optional[TokenStreams] = None  # of training
        self._restored: Optional[dict[str, Any]] = None  # from a checkpoint, until the next batch
        self._gathered: Optional[dict[str, Any]] = None  # for a checkpoint, until it is written

    @classmethod
    def setup_task(cls, cfg: StreamLanguageModelingConfig, **kwargs) -> "StreamLanguageModelingTask":
        """Loads the dictionary.

        Raises:
            UserError: no dictionary.
        """
        return cls(cfg, dictionary_of(cfg.data))

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        model = super().build_model(cfg, from_checkpoint)
        self.mem_len = getattr(cfg, "mem_len", 0)
        return model

    def load_dataset(self, split: str, **kwargs) -> None:
        """Maps the tokens of a split.

        Raises:
            UserError: a file is missing, damaged, empty or of another dictionary.
        """
        prefix = Path(self.cfg.data) / split
        tokens = open_tokens(prefix)
        check_items(prefix, len(self.dictionary), eos=None)  # characters have no ends
        self.datasets[split] = _Text(split, tokens)
        logger.info("%s: %d tokens", prefix, len(tokens))

    def get_batch_iterator(
        self,
        dataset: _Text,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        seed: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        **others,
    ) -> SegmentIterator:
        """The segments in order; none is shuffled.

        Raises:
            UserError: no ``--batch-size``; a segment or the memory is longer than a stream.
        """
        if max_sentences is None:
            raise UserError("--max-tokens does not determine the number of streams; give --batch-size")
        is_training = dataset.split == self.cfg.train_subset
        streams = TokenStreams(
            dataset.tokens,
            rows=max_sentences * num_shards,
            tgt_len=self.cfg.tgt_len if is_training else self.cfg.valid_tgt_len or self.cfg.tgt_len,
            eos=self.dictionary.eos(),
            pad=self.dictionary.pad(),
            shards=num_shards,
            shard=shard_id,
            keeps_rest=not is_training,
            cut=Cut(self.cfg.roll, self.cfg.varlen, seed, epoch) if is_training else EVEN,
        )
        if is_training:
            self._streams = streams
            check_memory_fits(self.mem_len, streams)
            logger.info("%d streams of %d tokens: %d segments", streams.rows, streams.longest, len(streams))
        taken = {name: others[name] for name in ("num_workers", "skip_remainder_batch") if name in others}
        return SegmentIterator(streams, epoch=epoch, buffer_size=data_buffer_size, **taken)

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        """fairseq's step, with the memory of the segments before; a dummy batch leaves no memory."""
        if ignore_grad:  # a dummy, so that this worker keeps step with others
            sample = _with_memory(sample, StreamMemory())
            return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
        self._restore_memory()
        self.validation.memory.clear()  # it is done, and its memory is large
        sample = _with_memory(sample, self.training.before(sample["segment"]))
        result = super().train_step(sample, model, criterion, optimizer, update_num)
        self.training.has_read(sample["segment"])
        return result

    def valid_step(self, sample, model, criterion):
        sample = _with_memory(sample, self.validation.before(sample["segment"]))
        result = super().valid_step(sample, model, criterion)
        self.validation.has_read(sample["segment"])
        return result

    def forget_memory(self) -> None:
        """After an update that was skipped or undone: what it left in the memory may not be sound."""
        self._restored = None
        self.training.memory.clear()  # the streams continue without a past

    def keep_memory(self) -> Callable[[], None]:
        """Before an update. Returns what brings the memory of now back, where the update is given up."""
        self._restore_memory()
        states, segment = self.training.memory.state_dict(), self.training.next_segment

        def bring_back() -> None:
            self.training.memory.load_state_dict(states)
            self.training.next_segment = segment

        return bring_back

    def gather_memory(self) -> None:
        """Gathers the memories of all workers on the one that writes checkpoints; all workers call it."""
        if self._streams is not None:
            self._restore_memory()
            self._gathered = self.training.gather(self._shape())

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Returns what fairseq adds to a checkpoint's extra_state."""
        gathered, self._gathered = self._gathered, None
        return {} if gathered is None else {CHECKPOINT_KEY: gathered}

    def take_from_checkpoint(self, extra_state: dict[str, Any]) -> None:
        """Keeps a checkpoint's memory for the next batch, if it ends where that batch starts."""
        self._restored = extra_state.get(CHECKPOINT_KEY)
        if self._restored is None:
            self.training.memory.clear()
            logger.warning("the checkpoint has no memory of streams: they start with empty memory")

    def _restore_memory(self) -> None:
        if self._restored is not None:
            saved, self._restored = self._restored, None
            first = self._streams.shard * self._streams.rows_of_shard
            self.training.restore(saved, self._shape(), slice(first, first + self._streams.rows_of_shard))

    def _shape(self) -> Shape:
        """Tokens of the text, rows of all workers, tokens of segment and memory.

        And how epochs cut the streams; older checkpoints do not name it.
        """
        sizes = {"tokens": len(self._streams.tokens), "rows": self._streams.rows, "tgt_len": self._streams.tgt_len}
        cut = ", ".join(name for name in ("roll", "varlen") if getattr(self.cfg, name))
        return {**sizes, "mem_len": self.mem_len, "cut": cut}


def check_memory_fits(mem_len: int, streams: TokenStreams) -> None:
    """Raises a UserError where a stream ends before its memory is full."""
    if mem_len + streams.tgt_len > streams.longest:
        raise UserError(
            f"--mem-len {mem_len}: with segments of {streams.tgt_len} tokens (--tgt-len) it is longer than a stream, "
            f"which has {streams.longest}; give a smaller one, or fewer rows (--batch-size)"
        )


def _with_memory(sample: dict[str, Any], memory: StreamMemory) -> dict[str, Any]:
    """A copy, because fairseq keeps the first batch to use it again."""
    return {**sample, "net_input": {**sample["net_input"], "memory": memory}}
