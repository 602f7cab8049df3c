"""Task ``stream_language_modeling``: truncated back-propagation through long texts (Transformer-XL, section 3.2).

The text is cut into as many contiguous streams as an update's forward pass has rows, over all workers. A batch is the
next segment of each stream, in order. Nothing is shuffled, and each batch reads the memory of the one before, in the
same update (``--update-freq``) or the last. An epoch starts all streams anew, with empty memory: the text before a
stream's start is the end of the stream above it, which was last seen an epoch ago. Validation has a memory of its own,
empty at its start.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
from fairseq.data import Dictionary, FairseqDataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II, MISSING

from lazyformer_fairseq.data.datasets.token_streams import (
    StreamOptions,
    TokenStreams,
    check_memory_fits,
    cut_tokens,
    item_length,
    open_tokens,
    shape_of,
)
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.config import as_fairseq_reads
from lazyformer_fairseq.fairseq_plugin.reliability.options import ReliabilityConfig, option
from lazyformer_fairseq.fairseq_plugin.tasks.encoder_task import EncoderTask, dictionary_of
from lazyformer_fairseq.modules.networks.carried_memory import CHECKPOINT_KEY, CarriedMemory, Shape, with_memory
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.storage.indexed_format import check_items

logger = logging.getLogger(__name__)


@dataclass
class StreamLanguageModelingConfig(as_fairseq_reads(StreamOptions, "StreamConfig"), ReliabilityConfig):
    """Options of streams, and those of fairseq's that the task reads."""

    data: str = option(MISSING, "folder that lazyformer lm prepare wrote")
    train_subset: str = II("dataset.train_subset")


class _Text(FairseqDataset):
    """A split that is not cut into streams yet."""

    def __init__(self, split: str, tokens: np.ndarray):
        self.split = split
        self.tokens = tokens


class SegmentIterator(EpochBatchIterator):
    """Iterator over the segments of streams, in order; every item is a whole batch of this worker.

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
        """Return the place in the epoch, and its segments."""
        return {**super().state_dict(), "segments": len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the same share of the epoch."""
        position = state["iterations_in_epoch"]
        segments = state.get("segments", len(self))
        if position and segments != len(self):
            now = position * len(self) // segments
            logger.warning(
                "the checkpoint is from segment %d of %d and the streams have %d now (another batch size, number of "
                "processes or --tgt-len): continuing at segment %d, some of the text comes twice and some not at all",
                position,
                segments,
                len(self),
                now,
            )
            state = {**state, "iterations_in_epoch": now}
        super().load_state_dict(state)


@register_task("stream_language_modeling", dataclass=StreamLanguageModelingConfig)
class StreamLanguageModelingTask(EncoderTask):
    """Language modelling of streams, whose memory stays between batches; each worker keeps that of its own rows.

    Attributes:
        training: the memory in training.
        validation: the memory in validation.
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
        """Load the dictionary.

        Raises:
            UserError: there is none.
        """
        return cls(cfg, dictionary_of(cfg.data))

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """Build the model."""
        model = super().build_model(cfg, from_checkpoint)
        self.mem_len = getattr(cfg, "mem_len", 0)
        return model

    def load_dataset(self, split: str, **kwargs) -> None:
        """Map the tokens of a split.

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
        **others,
    ) -> SegmentIterator:
        """Return the segments in order; none is shuffled.

        Raises:
            UserError: no ``--batch-size``; a segment or the memory is longer than a stream.
        """
        if max_sentences is None:
            raise UserError("--max-tokens does not determine the number of streams; give --batch-size")
        is_training = dataset.split == self.cfg.train_subset
        epoch = others.get("epoch", 1)
        shards = others.get("num_shards", 1)
        streams = cut_tokens(
            dataset.tokens,
            rows=max_sentences * shards,
            tgt_len=self.cfg.tgt_len if is_training else self.cfg.valid_tgt_len or self.cfg.tgt_len,
            eos=self.dictionary.eos(),
            pad=self.dictionary.pad(),
            item=item_length(self.cfg.data),
            shards=shards,
            shard=others.get("shard_id", 0),
            keeps_rest=not is_training,
            roll=self.cfg.roll and is_training,
            seed=others.get("seed", 1),
            epoch=epoch,
        )
        if is_training:
            self._streams = streams
            check_memory_fits(self.mem_len, streams)
            logger.info("%d streams of %d tokens: %d segments", streams.rows, streams.longest, len(streams))
        taken = {name: others[name] for name in ("num_workers", "skip_remainder_batch") if name in others}
        return SegmentIterator(streams, epoch=epoch, buffer_size=others.get("data_buffer_size", 0), **taken)

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        """Train on a batch with the memory of the segments before; a dummy batch leaves no memory."""
        if ignore_grad:  # a dummy, so that this worker keeps step with others
            sample = with_memory(sample, StreamMemory())
            return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
        self._restore_memory()
        self.validation.memory.clear()  # it is done, and its memory is large
        sample = with_memory(sample, self.training.before(sample["segment"]))
        result = super().train_step(sample, model, criterion, optimizer, update_num)
        self.training.has_read(sample["segment"])
        return result

    def valid_step(self, sample, model, criterion):
        """Validate on a batch with the memory of the segments before."""
        sample = with_memory(sample, self.validation.before(sample["segment"]))
        result = super().valid_step(sample, model, criterion)
        self.validation.has_read(sample["segment"])
        return result

    def forget_memory(self) -> None:
        """Drop the memory after an update that was skipped or undone: what it left there may not be sound."""
        self._restored = None
        self.training.memory.clear()  # the streams continue without a past

    def keep_memory(self) -> Callable[[], None]:
        """Return what brings the memory of now back, where the update that follows is given up."""
        self._restore_memory()
        states = self.training.memory.state_dict()
        segment = self.training.next_segment

        def bring_back() -> None:
            self.training.memory.load_state_dict(states)
            self.training.next_segment = segment

        return bring_back

    def gather_memory(self) -> None:
        """Gather the memories of all workers on the one that writes checkpoints; all workers call it."""
        if self._streams is not None:
            self._restore_memory()
            self._gathered = self.training.gather(self._shape())

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Return what fairseq adds to a checkpoint's extra state."""
        gathered = self._gathered
        self._gathered = None
        if gathered is None:
            return {}
        return {CHECKPOINT_KEY: gathered}

    def take_from_checkpoint(self, extra_state: dict[str, Any]) -> None:
        """Keep a checkpoint's memory for the next batch, if it ends where that batch starts."""
        self._restored = extra_state.get(CHECKPOINT_KEY)
        if self._restored is None:
            self.training.memory.clear()
            logger.warning("the checkpoint has no memory of streams: they start with empty memory")

    def _restore_memory(self) -> None:
        if self._restored is not None:
            saved = self._restored
            self._restored = None
            self.training.restore(saved, self._shape(), self._streams.own_rows)

    def _shape(self) -> Shape:
        return shape_of(self._streams, self.mem_len, self.cfg)
