"""The interface between objectives and the trainers that run them, and helpers for aggregating logged values."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Optional, Union

from torch import Tensor, nn

from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.processes import ALONE, Processes

Batch = dict[str, Any]
Log = Mapping[str, Any]  # sums over a batch's predictions, by name
Number = Union[int, float, Tensor]

NOTHING_PREDICTED = "the validation text is too short: it contains no tokens to predict; provide more text"


@dataclass(frozen=True)
class Scalar:
    """A logged number.

    Attributes:
        value: the mean over the predictions of one or more batches.
        weight: the number of predictions, used as the weight when values are averaged.
        digits: the number of decimal places shown in logs and results.
    """

    value: Number
    weight: Number
    digits: int = 3


class Objective(ABC):
    """A training objective: the model, its batches, loss and metrics. Each run needs a separate instance.

    Attributes:
        network: the model; None if another trainer builds it.
        dictionary: the dictionary for inputs and targets.
        batch_size: the number of inputs per batch.
        tokenizer_folder: the tokenizer to copy next to the checkpoints, if any.
        CRITERION: the name of the loss in checkpoints.
    """

    network: Optional[Network]
    dictionary: Any
    batch_size: int
    tokenizer_folder: Optional[Path] = None
    CRITERION: ClassVar[str] = ""

    @property
    def own_network(self) -> Network:
        """The network, which must not be None because this objective builds the model itself."""
        assert self.network is not None
        return self.network

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model, randomly initialized or with the weights from the objective's checkpoint.

        Trainers call this exactly once, before any other method.
        """

    @abstractmethod
    def batches(self, processes: Processes = ALONE) -> EpochBatches:
        """Return this process's training batches, given the processes that contribute to each update."""

    @abstractmethod
    def data_folders(self) -> list[Path]:
        """Return the data folders."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Number, dict[str, Any]]:
        """Compute the loss of a batch.

        Returns:
            The summed loss with penalty terms, the number of predictions to divide the gradient by, and the sums to
            log, including the `loss` without penalty terms.
        """

    @staticmethod
    @abstractmethod
    def scalars(logs: Sequence[Log]) -> dict[str, Scalar]:
        """Aggregate logs into the scalars that a trainer reports.

        Args:
            logs: the logs of all batches in an update, from all processes, or the log of one validation batch.
        """

    @abstractmethod
    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of `model`, `task` and `criterion` in the checkpoint format."""

    def held_out(self, split: str) -> Iterable[Batch]:
        """Return the batches of a held-out split, in order.

        Raises:
            NotImplementedError: the objective uses streams, which are evaluated elsewhere.
        """
        raise NotImplementedError

    def measures(self, logs: Sequence[Log]) -> dict[str, float]:
        """Return a split's metrics, given the logs of all its batches.

        Raises:
            UserError: no batch contains any predictions.
        """
        of_batches = [self.scalars([log]) for log in logs]
        return {name: mean([scalars[name] for scalars in of_batches]) for name in of_batches[0]}

    def at_update(self, batch: Batch, update: int) -> Batch:
        """Adapt a training batch to an update, for example by masking it; updates are counted from 0."""
        return batch

    def forget(self) -> None:  # noqa: B027
        """Discard any state left behind by a skipped update."""

    def task_state(self) -> dict[str, Any]:
        """Return the heads' descriptions, which checkpoints store."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume a run in addition to weights and batches."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the state returned by :meth:`state_dict` from a checkpoint's extra state."""


def shard_batches(batches: EpochBatches, processes: Processes) -> EpochBatches:
    """Restrict batches to this process's shard, in place, and return them."""
    batches.shard = processes.rank
    batches.shards = processes.count
    return batches


def mean(scalars: Sequence[Scalar]) -> float:
    """Return the weighted mean of a scalar over batches, rounded to its number of digits.

    Raises:
        UserError: no batch contains any predictions.
    """
    predicting = [scalar for scalar in scalars if scalar.weight]
    if not predicting:
        raise UserError(NOTHING_PREDICTED)
    weighted_sum = sum(scalar.value * scalar.weight for scalar in predicting)
    weight = sum(scalar.weight for scalar in predicting)
    return round(float(weighted_sum / weight), predicting[0].digits)


def total(logs: Sequence[Log], name: str) -> Number:
    """Sum a logged number over batches."""
    return sum(log.get(name, 0) for log in logs)


def mean_per_prediction(logs: Sequence[Log], name: str, predictions: str = "sample_size") -> Number:
    """Divide a logged sum by the number of predictions; return 0 if the batches contain no predictions.

    Args:
        logs: the logs of the batches.
        name: the key of the sum.
        predictions: the key of the number of predictions.
    """
    count = total(logs, predictions)
    divisor: Number
    if isinstance(count, Tensor):
        divisor = count.clamp(min=1)
    else:
        divisor = max(count, 1)
    return total(logs, name) / divisor


def in_bits(nats: Number) -> Number:
    """Convert nats to bits."""
    return nats / math.log(2)
