"""Causal language modeling on text streams, with a memory that is carried from segment to segment."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Optional

import numpy as np
from torch import Tensor, nn

from lazyformer_fairseq.data.datasets.token_streams import (
    EpochSegments,
    StreamOptions,
    TokenStreams,
    check_memory_fits,
    item_length,
    make_streams,
    memory_settings,
    open_tokens,
)
from lazyformer_fairseq.data.text.dictionary_file import Dictionary, load_dictionary
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.modules.networks.carried_memory import CHECKPOINT_KEY, CarriedMemory, RunSettings, with_memory
from lazyformer_fairseq.modules.networks.options import CausalLMOptions
from lazyformer_fairseq.storage.indexed_format import check_items
from lazyformer_fairseq.training.objectives.interface import (
    Batch,
    Log,
    Objective,
    Scalar,
    in_bits,
    mean_per_prediction,
    total,
)
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.processes import ALONE, Processes

logger = logging.getLogger(__name__)


@dataclass
class StreamLMObjective(Objective):
    """Objective for causal language modeling on streams.

    Attributes:
        network: the model; None if another trainer builds it and sets `mem_len`.
        data: a folder written by `lazyformer lm`.
        batch_size: the number of streams per process.
        seed: the seed that determines where the text is cut into streams.
        text: options of :class:`StreamOptions`, by name.
        memory: the memory for the next training batch.
        mem_len: the maximum number of tokens in the memory.
    """

    network: Optional[Network]
    data: str
    batch_size: int
    seed: int
    text: Mapping[str, Any]
    CRITERION: ClassVar[str] = "CausalLMCriterion"

    def __post_init__(self) -> None:
        self.options = StreamOptions(**self.text)
        self.memory = CarriedMemory()
        self.mem_len = 0
        if self.network is not None:
            model_options = self.network.options
            assert isinstance(model_options, CausalLMOptions)
            self.mem_len = model_options.mem_len
        self._streams: Optional[TokenStreams] = None  # the training streams
        self._saved: Optional[dict[str, Any]] = None  # a checkpoint's memory, until the training streams are known

    @cached_property
    def dictionary(self) -> Dictionary:
        """The dictionary for inputs and targets."""
        return load_dictionary(Path(self.data) / "dict.txt")

    def build_model(self) -> nn.Module:
        """Build the model with random weights."""
        return self.own_network.build(self.dictionary)

    def tokens(self, split: str) -> np.ndarray:
        """Open and check a split's tokens.

        Raises:
            UserError: a file is missing, damaged or empty, or it contains ids that are not in the dictionary.
        """
        prefix = Path(self.data) / split
        tokens = open_tokens(prefix)
        check_items(prefix, len(self.dictionary), eos=None)  # character data has no end-of-sentence symbols
        return tokens

    def batches(self, processes: Processes = ALONE) -> EpochSegments:
        """Return the segments from this process's training streams, in order."""
        return EpochSegments(self.training_streams(self.tokens("train"), processes))

    def training_streams(self, tokens: np.ndarray, processes: Processes, epoch: int = 1) -> TokenStreams:
        """Cut the training text into this process's streams, and set up the memory for them.

        Raises:
            UserError: a segment or the memory is longer than a stream.
        """
        streams = self._cut(tokens, self.options.tgt_len, processes, roll=self.options.roll, epoch=epoch)
        check_memory_fits(self.mem_len, streams)
        self._streams = streams
        self._restore_memory()
        return streams

    def held_out_streams(self, tokens: np.ndarray, processes: Processes) -> TokenStreams:
        """Cut a held-out text into this process's streams, so that each token is predicted exactly once."""
        tgt_len = self.options.valid_tgt_len or self.options.tgt_len
        return self._cut(tokens, tgt_len, processes, keeps_rest=True)

    def _cut(self, tokens: np.ndarray, tgt_len: int, processes: Processes, **how: Any) -> TokenStreams:
        return make_streams(
            tokens,
            tgt_len,
            item_length(self.data),
            rows=self.batch_size * processes.count,
            eos=self.dictionary.eos(),
            pad=self.dictionary.pad(),
            shards=processes.count,
            shard=processes.rank,
            seed=self.seed,
            **how,
        )

    def data_folders(self) -> list[Path]:
        """Return the data folder."""
        return [Path(self.data)]

    def at_update(self, batch: Batch, update: int) -> Batch:
        """Add the memory of the preceding segments to a batch."""
        return with_memory(batch, self.memory.before(batch["segment"]))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Compute the cross-entropy of the next tokens, and advance the memory past the segment."""
        result = losses.causal_lm(model, batch, self.dictionary.pad())
        self.memory.has_read(batch["segment"])
        return result

    @staticmethod
    def scalars(logs: Sequence[Log]) -> dict[str, Scalar]:
        """Return `loss` in bits per token, and any span and expert terms."""
        return next_token_scalars(logs)

    def forget(self) -> None:
        """Clear the memory after a skipped update, which may have left NaN or Inf in it."""
        self.memory.memory.clear()

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings to store in checkpoints."""
        task = {"_name": "stream_language_modeling", "data": self.data, **asdict(self.options)}
        return {"model": self.own_network.settings(), "task": task, "criterion": {"_name": "causal_lm"}}

    def state_dict(self) -> dict[str, Any]:
        """Gather the memory of all processes on the one that writes checkpoints; all processes must call this."""
        if self._streams is None:
            return {}
        return {CHECKPOINT_KEY: self.memory.gather(self._shape(self._streams))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the memory if the checkpoint contains one; otherwise clear it."""
        self._saved = state.get(CHECKPOINT_KEY)
        if self._saved is None:
            self.memory.memory.clear()
            logger.warning("the checkpoint contains no memory for the streams, so they start with an empty memory")
        self._restore_memory()

    def _restore_memory(self) -> None:
        if self._saved is not None and self._streams is not None:
            self.memory.restore(self._saved, self._shape(self._streams), self._streams.own_rows)
            self._saved = None

    def _shape(self, streams: TokenStreams) -> RunSettings:
        return memory_settings(streams, self.mem_len, self.options)


def next_token_scalars(logs: Sequence[Log]) -> dict[str, Scalar]:
    """Return `loss` in bits per predicted token and, if the model has them, learned-span and expert terms.

    `span` is the mean span over heads and sublayers; `experts_dropped` is the percentage of token-to-expert assignments
    that were dropped because the expert was full.
    """
    predictions = total(logs, "sample_size")
    found = {"loss": Scalar(in_bits(mean_per_prediction(logs, "loss")), predictions)}
    if "span" in logs[0]:
        found["span"] = Scalar(mean_per_prediction(logs, "span"), predictions, digits=1)
        found["span_loss"] = Scalar(in_bits(mean_per_prediction(logs, "span_loss")), predictions, digits=5)
    if "experts_loss" in logs[0]:
        found["experts_loss"] = Scalar(in_bits(mean_per_prediction(logs, "experts_loss")), predictions, digits=5)
        wanted = total(logs, "experts_wanted")
        dropped = total(logs, "experts_dropped")
        found["experts_dropped"] = Scalar(100 * dropped / wanted, wanted, digits=2)
    return found
