"""The training objective of a supernet.

The weights are trained on one part of the training text and the architecture on the rest, in alternating updates (PAR
Transformer, section 2.2).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.data.datasets.token_streams import item_length
from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet import Architecture, Supernet
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.training.objectives.interface import Batch, Log, Number, Objective, Scalar, shard_batches
from lazyformer_fairseq.training.objectives.masked_lm import MaskedLMObjective
from lazyformer_fairseq.training.objectives.stream_lm import StreamLMObjective
from lazyformer_fairseq.training.processes import ALONE, Processes

# The two sides that are trained; the parts of the text are named after them.
WEIGHTS = "weights"
ARCHITECTURE = "architecture"
SIDE = "side"  # the key in a batch that names its side
ARCHITECTURE_SHARE = 0.2  # the fraction of the training data reserved for the architecture


def side_at(update: int, constant_updates: int) -> str:
    """Return the side that is trained in an update; updates are counted from 0.

    After the constant updates, every n-th update trains the architecture, where n is the inverse of the architecture's
    fraction of the data.
    """
    every = round(1 / ARCHITECTURE_SHARE)
    if update >= constant_updates and update % every == every - 1:
        return ARCHITECTURE
    return WEIGHTS


def part_of(side: str, count: int, what: str) -> range:
    """Return the range of blocks or tokens that a side is trained on; the last ones are reserved for the architecture.

    Args:
        side: WEIGHTS or ARCHITECTURE.
        count: the total number of blocks or tokens.
        what: "blocks" or "tokens", for the error message.

    Raises:
        UserError: a part would be empty.
    """
    border = count - round(count * ARCHITECTURE_SHARE)
    if not 0 < border < count:
        raise UserError(
            f"the training data has too little text ({count} {what}) to reserve {ARCHITECTURE_SHARE:.0%} of it for the "
            "architecture; use more text"
        )
    if side == WEIGHTS:
        return range(border)
    return range(border, count)


@dataclass
class BlocksPart(MaskedLMObjective):
    """Masked language modeling on one side's blocks, which come from the first shard."""

    side: str = WEIGHTS

    def batches(self, processes: Processes = ALONE) -> EpochBatches:
        """Return this side's training batches."""
        blocks = self.texts.split("train").now
        part = part_of(self.side, len(blocks), "blocks")
        return shard_batches(EpochBatches(blocks, self.batch_size, seed=self.seed, sample_range=part), processes)


@dataclass
class StreamsPart(StreamLMObjective):
    """Causal language modeling on one side's text, with a separate memory."""

    side: str = WEIGHTS

    def tokens(self, split: str) -> np.ndarray:
        """Open the part of a split that this side is trained on."""
        if item_length(self.data):
            raise UserError(f"{self.data} contains images, but a search requires text that it can split; use text data")
        tokens = super().tokens(split)
        part = part_of(self.side, len(tokens), "tokens")
        return tokens[part.start : part.stop]


class BatchesInTurn:
    """An endless iterable over both sides' batches, in the supernet's update order.

    An update at the end of a side's epoch is padded with empty batches if it has too few.

    Args:
        sides: each side's batches.
        per_update: the number of batches per update.
        constant_updates: the number of initial updates that train only the weights.

    Attributes:
        updates: the number of updates for which batches have been read.
    """

    shuffle = True

    def __init__(self, sides: Mapping[str, EpochBatches], per_update: int, constant_updates: int):
        self.sides = sides
        self.per_update = per_update
        self.constant_updates = constant_updates
        self.updates = 0

    @property
    def epoch(self) -> int:
        """The current epoch on the weights' text."""
        return self.sides[WEIGHTS].epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        passes = {side: iter(batches) for side, batches in self.sides.items()}
        while True:
            side = side_at(self.updates, self.constant_updates)
            batches = list(islice(passes[side], self.per_update))
            if not batches:  # the epoch is over
                passes[side] = iter(self.sides[side])
                batches = list(islice(passes[side], self.per_update))
            self.updates += 1
            for batch in batches:
                yield {**batch, SIDE: side}
            for _ in range(self.per_update - len(batches)):
                yield {}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in each side's text and the number of updates."""
        sides = {side: batches.state_dict() for side, batches in self.sides.items()}
        return {**sides[WEIGHTS], "updates": self.updates, "sides": sides}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last update for which batches have been read."""
        self.updates = state["updates"]
        for side, batches in self.sides.items():
            batches.load_state_dict(state["sides"][side])


@dataclass
class SupernetObjective(Objective):
    """The objective of a supernet, which trains weights and architecture alternately.

    Attributes:
        sides: each side's objective; the weights' objective builds the model that becomes the supernet.
        search: the search's settings.
    """

    sides: Mapping[str, Objective]
    search: SearchSettings

    def __post_init__(self):
        self.batch_size = self.sides[WEIGHTS].batch_size
        self.CRITERION = self.sides[WEIGHTS].CRITERION

    @property
    def dictionary(self) -> Dictionary:
        """The dictionary of inputs and targets."""
        return self.sides[WEIGHTS].dictionary

    def build_model(self) -> Supernet:
        """Build the supernet with new weights and equal probabilities for all candidates."""
        model = self.sides[WEIGHTS].build_model()
        network = next(module for module in model.modules() if isinstance(module, Stack))
        return Supernet(model, network, Architecture(self.search.layers, self.search.candidates))

    def batches(self, processes: Processes = ALONE) -> BatchesInTurn:
        """Return both sides' batches, in update order.

        Raises:
            UserError: there is too little text, or the text does not fit the model.
        """
        sides = {side: objective.batches(processes) for side, objective in self.sides.items()}
        return BatchesInTurn(sides, self.search.update_freq, self.search.constant_updates)

    def data_folders(self) -> list[Path]:
        """Return the folders that the data is read from."""
        return self.sides[WEIGHTS].data_folders()

    def at_update(self, batch: Batch, update: int) -> Batch:
        """Prepare a batch for an update, using the objective of the batch's side."""
        return self.sides[batch[SIDE]].at_update(batch, update)

    def loss(self, model: Supernet, batch: Batch) -> tuple[Tensor, Number, dict[str, Any]]:
        """Compute a batch's loss, using the objective of the batch's side."""
        return self.sides[batch[SIDE]].loss(model, batch)

    def scalars(self, logs: Sequence[Log]) -> dict[str, Scalar]:
        """Return the values that the sides' objectives log."""
        return self.sides[WEIGHTS].scalars(logs)

    def forget(self) -> None:
        """Discard the state left behind by a skipped update."""
        for objective in self.sides.values():
            objective.forget()

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings to store in checkpoints."""
        settings = self.sides[WEIGHTS].settings()
        own = {"_name": "supernet", "candidates": list(self.search.candidates), "layers": self.search.layers}
        turns = {"constant_updates": self.search.constant_updates, "architecture_share": ARCHITECTURE_SHARE}
        return settings | {"model": settings["model"] | own, "task": settings["task"] | turns}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that each side carries from batch to batch."""
        return {"sides": {side: objective.state_dict() for side, objective in self.sides.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that each side carries from batch to batch."""
        for side, objective in self.sides.items():
            objective.load_state_dict(state["sides"][side])
