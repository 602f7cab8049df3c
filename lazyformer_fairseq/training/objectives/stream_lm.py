"""Causal language modelling of a text in streams, with a memory carried from segment to segment."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from lazyformer_fairseq.data.datasets.token_streams import (
    EpochSegments,
    StreamOptions,
    TokenStreams,
    check_memory_fits,
    cut_tokens,
    item_length,
    open_tokens,
    shape_of,
)
from lazyformer_fairseq.data.text.dictionary_file import Dictionary, load_dictionary
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.modules.networks.carried_memory import CHECKPOINT_KEY, CarriedMemory, with_memory
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


@dataclass
class StreamLMObjective(Objective):
    """Causal language modelling of streams.

    Attributes:
        network: the model.
        data: a folder of `lazyformer lm`.
        batch_size: streams per process.
        seed: the seed of cuts.
        text: options of :class:`StreamOptions`, by name.
    """

    network: Network
    data: str
    batch_size: int
    seed: int
    text: Mapping[str, Any]
    CRITERION: ClassVar[str] = "CausalLMCriterion"

    def __post_init__(self):
        self.options = StreamOptions(**self.text)
        self.memory = CarriedMemory()
        self.mem_len = self.network.options.mem_len

    @cached_property
    def dictionary(self) -> Dictionary:
        """The symbols of inputs and targets."""
        return load_dictionary(Path(self.data) / "dict.txt")

    def build_model(self) -> nn.Module:
        """Build the model with fresh weights."""
        return self.network.build(self.dictionary)

    def tokens(self) -> np.ndarray:
        """Open and check the training text."""
        prefix = Path(self.data) / "train"
        tokens = open_tokens(prefix)
        check_items(prefix, len(self.dictionary), eos=None)  # characters have no ends
        return tokens

    def batches(self, processes: Processes = ALONE) -> EpochSegments:
        """Return the segments of this process's streams, in order."""
        options = self.options
        tokens = self.tokens()
        item = item_length(self.data)

        def open_streams(epoch: int) -> TokenStreams:
            return cut_tokens(
                tokens,
                options.tgt_len,
                item,
                rows=self.batch_size * processes.count,
                eos=self.dictionary.eos(),
                pad=self.dictionary.pad(),
                shards=processes.count,
                shard=processes.rank,
                roll=options.roll,
                seed=self.seed,
                epoch=epoch,
            )

        segments = EpochSegments(open_streams)
        check_memory_fits(self.mem_len, segments.dataset)
        self._shape = shape_of(segments.dataset, self.mem_len, options)
        self._rows = segments.dataset.own_rows
        return segments

    def data_folders(self) -> list[Path]:
        """Return the folder of the text."""
        return [Path(self.data)]

    def at_update(self, batch: Batch, update: int) -> Batch:
        """Return a batch with the memory of the segments before it."""
        return with_memory(batch, self.memory.before(batch["segment"]))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Compute the cross-entropy of the next tokens; the memory then holds the segment."""
        result = losses.causal_lm(model, batch, self.dictionary.pad())
        self.memory.has_read(batch["segment"])
        return result

    @staticmethod
    def scalars(logs: Sequence[Log]) -> dict[str, Scalar]:
        """Return `loss`, bits per token, and the terms of spans and experts."""
        return next_token_scalars(logs)

    def forget(self) -> None:
        """Empty the memory after an update that was skipped."""
        self.memory.memory.clear()

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings that checkpoints keep."""
        task = {"_name": "stream_language_modeling", "data": self.data, **asdict(self.options)}
        return {"model": self.network.settings(), "task": task, "criterion": {"_name": "causal_lm"}}

    def state_dict(self) -> dict[str, Any]:
        """Return the memory."""
        return {CHECKPOINT_KEY: self.memory.gather(self._shape)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the memory, if the checkpoint has one."""
        saved = state.get(CHECKPOINT_KEY)
        if saved is not None:
            self.memory.restore(saved, self._shape, self._rows)


def next_token_scalars(logs: Sequence[Log]) -> dict[str, Scalar]:
    """Return `loss`, bits per predicted token; where the model has them, the terms of spans and experts too.

    `span` is the mean over heads and sublayers; `experts_dropped` the percentage of requests that found no slot.
    """
    predictions = total(logs, "sample_size")
    found = {"loss": Scalar(in_bits(mean_per_prediction(logs, "loss")), predictions)}
    if "span" in logs[0]:
        found["span"] = Scalar(mean_per_prediction(logs, "span"), predictions, digits=1)
        found["span_loss"] = Scalar(in_bits(mean_per_prediction(logs, "span_loss")), predictions, digits=5)
    if "experts_loss" in logs[0]:
        found["experts_loss"] = Scalar(in_bits(mean_per_prediction(logs, "experts_loss")), predictions, digits=5)
        wanted = total(logs, "experts_wanted")
        found["experts_dropped"] = Scalar(100 * total(logs, "experts_dropped") / wanted, wanted, digits=2)
    return found
