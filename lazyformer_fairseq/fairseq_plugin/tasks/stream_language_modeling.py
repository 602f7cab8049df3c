"""The task ``stream_language_modeling``: truncated backpropagation through long texts (Transformer-XL, section 3.2).

The text is split into contiguous streams, one for each batch row of each process. A batch consists of the next segment
of each stream, in order. Nothing is shuffled, and each batch attends to the memory of the previous batch, which may
belong to the same update (with ``--update-freq``) or to the previous one. Every epoch starts all streams with empty
memory, because the text before a stream is the end of another stream, which was last read an epoch ago. Validation has
a separate memory, which is empty at the start.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Optional

import numpy as np
from fairseq.data import FairseqDataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II, MISSING

from lazyformer_fairseq.data.datasets.token_streams import StreamOptions, TokenStreams
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.config import to_fairseq_dataclass
from lazyformer_fairseq.fairseq_plugin.reliability.options import ReliabilityConfig, option
from lazyformer_fairseq.fairseq_plugin.tasks.encoder_task import EncoderTask
from lazyformer_fairseq.modules.networks.carried_memory import CarriedMemory, with_memory
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.training.objectives.stream_lm import StreamLMObjective
from lazyformer_fairseq.training.processes import Processes

logger = logging.getLogger(__name__)


@dataclass
class StreamLanguageModelingConfig(to_fairseq_dataclass(StreamOptions, "StreamConfig"), ReliabilityConfig):
    """Options of streams, and the fairseq options that the task reads."""

    data: str = option(MISSING, "folder written by lazyformer lm prepare")
    train_subset: str = II("dataset.train_subset")


class _Text(FairseqDataset):
    """A split of the data that has not been split into streams yet."""

    def __init__(self, split: str, tokens: np.ndarray):
        self.split = split
        self.tokens = tokens


class SegmentIterator(EpochBatchIterator):
    """An iterator over the streams' segments, in order; each item is one of this process's batches.

    A run may resume with different streams (a different batch size, number of processes or segment length). It then
    continues after the same fraction of the epoch. Since the new streams start elsewhere in the text, some text is read
    twice and some not at all.
    """

    def __init__(self, streams: TokenStreams, **settings: Any):
        super().__init__(
            streams,
            collate_fn=streams.collater,
            batch_sampler=[[segment] for segment in range(len(streams))],
            disable_shuffling=True,
            persistent_workers=False,  # each epoch has a new iterator, so the workers would never be reused
            **settings,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch and the number of segments per epoch."""
        return {**super().state_dict(), "segments": len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the same fraction of the epoch."""
        position = state["iterations_in_epoch"]
        segments = state.get("segments", len(self))
        if position and segments != len(self):
            now = position * len(self) // segments
            logger.warning(
                "the checkpoint is from segment %d of %d, but the streams now have %d (different batch size, number of "
                "processes or --tgt-len): continuing at segment %d, so some text is read twice and some not at all",
                position,
                segments,
                len(self),
                now,
            )
            state = {**state, "iterations_in_epoch": now}
        super().load_state_dict(state)


@register_task("stream_language_modeling", dataclass=StreamLanguageModelingConfig)
class StreamLanguageModelingTask(EncoderTask):
    """The fairseq task for :class:`~lazyformer_fairseq.training.objectives.stream_lm.StreamLMObjective`.

    The memory persists between batches; each process stores the memory of its own rows.

    Attributes:
        objective: the objective, which splits the text into streams and stores the training memory.
        validation: the validation memory.
    """

    cfg: StreamLanguageModelingConfig

    def __init__(self, cfg: StreamLanguageModelingConfig, objective: StreamLMObjective):
        super().__init__(cfg, objective.dictionary)
        self.objective = objective
        self.validation = CarriedMemory()
        self._gathered: dict[str, Any] = {}  # all processes' memory, until the checkpoint is written

    @classmethod
    def setup_task(cls, cfg: StreamLanguageModelingConfig, **kwargs) -> "StreamLanguageModelingTask":
        """Load the data's dictionary and create the task.

        Raises:
            UserError: there is no dictionary.
        """
        objective = StreamLMObjective(
            network=None,
            data=cfg.data,
            batch_size=0,  # set once fairseq requests batches
            seed=1,
            text={field.name: getattr(cfg, field.name) for field in fields(StreamOptions)},
        )
        logger.info("dictionary: %d symbols from %s", len(objective.dictionary), cfg.data)
        return cls(cfg, objective)

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """Build the model."""
        model = super().build_model(cfg, from_checkpoint)
        self.objective.mem_len = getattr(cfg, "mem_len", 0)
        return model

    def load_dataset(self, split: str, **kwargs) -> None:
        """Memory-map a split's tokens.

        Raises:
            UserError: a file is missing, damaged or empty, or was written with a different dictionary.
        """
        tokens = self.objective.tokens(split)
        self.datasets[split] = _Text(split, tokens)
        logger.info("%s: %d tokens", Path(self.cfg.data) / split, len(tokens))

    def get_batch_iterator(
        self,
        dataset: _Text,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        **others,
    ) -> SegmentIterator:
        """Return an iterator over a split's segments, in order.

        Args:
            dataset: the split.
            max_tokens: ignored.
            max_sentences: the number of streams per process.
            others: further arguments of fairseq's method.

        Raises:
            UserError: ``--batch-size`` is missing, or a segment or the memory is longer than a stream.
        """
        if max_sentences is None:
            raise UserError("--max-tokens does not determine the number of streams; set --batch-size instead")
        objective = self.objective
        objective.batch_size = max_sentences
        objective.seed = others.get("seed", 1)
        processes = Processes(rank=others.get("shard_id", 0), count=others.get("num_shards", 1))
        epoch = others.get("epoch", 1)
        if dataset.split == self.cfg.train_subset:
            streams = objective.training_streams(dataset.tokens, processes, epoch)
            logger.info("%d streams of %d tokens: %d segments", streams.rows, streams.longest, len(streams))
        else:
            streams = objective.held_out_streams(dataset.tokens, processes)
        taken = {name: others[name] for name in ("num_workers", "skip_remainder_batch") if name in others}
        return SegmentIterator(streams, epoch=epoch, buffer_size=others.get("data_buffer_size", 0), **taken)

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        """Train on a batch with the memory of the previous segments; a dummy batch leaves the memory unchanged."""
        if ignore_grad:  # a dummy batch that keeps this process in step with the others
            sample = with_memory(sample, StreamMemory())
            return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
        self.validation.memory.clear()  # validation is over, and its memory is large
        sample = self.objective.at_update(sample, update_num)
        result = super().train_step(sample, model, criterion, optimizer, update_num)
        self.objective.memory.has_read(sample["segment"])
        return result

    def valid_step(self, sample, model, criterion):
        """Validate on a batch with the memory of the previous segments."""
        sample = with_memory(sample, self.validation.before(sample["segment"]))
        result = super().valid_step(sample, model, criterion)
        self.validation.has_read(sample["segment"])
        return result

    def forget_memory(self) -> None:
        """Clear the memory after an update that was skipped or undone; the streams continue with empty memory."""
        self.objective.forget()

    def keep_memory(self) -> Callable[[], None]:
        """Return a function that restores the current memory if the next update is abandoned."""
        carried = self.objective.memory
        states = carried.memory.state_dict()
        segment = carried.next_segment

        def bring_back() -> None:
            carried.memory.load_state_dict(states)
            carried.next_segment = segment

        return bring_back

    def gather_memory(self) -> None:
        """Gather all processes' memories on the process that writes checkpoints; every process must call this."""
        self._gathered = self.objective.state_dict()

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Return the state that fairseq adds to a checkpoint's extra state."""
        gathered = self._gathered
        self._gathered = {}
        return gathered

    def take_from_checkpoint(self, extra_state: dict[str, Any]) -> None:
        """Restore the memory from a checkpoint's extra state, if the memory ends where the next batch starts."""
        self.objective.load_state_dict(extra_state)
