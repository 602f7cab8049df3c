"""The interface between objectives and the trainers that run them, and helpers to aggregate logged values."""

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
Log = Mapping[str, Any]  # sums over the predictions of a batch, by name
Number = Union[int, float, Tensor]

NOTHING_PREDICTED = "no token of the validation text is predicted, because the text is too short; provide more of it"


@dataclass(frozen=True)
class Scalar:
    """A logged number.

    Attributes:
        value: the mean over the predictions of one or several batches.
        weight: the number of predictions, which weights the value when several are averaged.
        digits: the number of decimals shown in logs and results.
    """

    value: Number
    weight: Number
    digits: int = 3


class Objective(ABC):
    """A model's training task: its model, batches, loss and metrics. Each training needs an object of its own.

    Attributes:
        network: the model; None if another trainer builds it.
        dictionary: the dictionary of inputs and targets.
        batch_size: inputs per batch.
        tokenizer_folder: the tokenizer to copy beside checkpoints; None if there is none.
        CRITERION: the name of the loss in checkpoints.
    """

    network: Optional[Network]
    dictionary: Any
    batch_size: int
    tokenizer_folder: Optional[Path] = None
    CRITERION: ClassVar[str] = ""

    @property
    def own_network(self) -> Network:
        """The network, which must be set: this objective builds its model itself."""
        assert self.network is not None
        return self.network

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model, with fresh weights or those of the objective's checkpoint.

        Trainers call this exactly once, before any other method.
        """

    @abstractmethod
    def batches(self, processes: Processes = ALONE) -> EpochBatches:
        """Return the training batches of this process, one of `processes` that share each update."""

    @abstractmethod
    def data_folders(self) -> list[Path]:
        """Return the folders that the data is read from."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Number, dict[str, Any]]:
        """Compute the loss of a batch.

        Returns:
            The summed loss with penalties, the number of predictions by which the gradient is divided, and the sums to
            log, including the `loss` without penalties.
        """

    @staticmethod
    @abstractmethod
    def scalars(logs: Sequence[Log]) -> dict[str, Scalar]:
        """Aggregate logs into the scalars that a trainer reports.

        Args:
            logs: the logs of all batches of an update, from all processes, or the log of one validation batch.
        """

    @abstractmethod
    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of `model`, `task` and `criterion` in the form that checkpoints store."""

    def held_out(self, split: str) -> Iterable[Batch]:
        """Return the batches of a held-out split, in order.

        Raises:
            NotImplementedError: the objective reads streams, which are evaluated elsewhere.
        """
        raise NotImplementedError

    def measures(self, logs: Sequence[Log]) -> dict[str, float]:
        """Return the metrics of a split from the logs of all its batches.

        Raises:
            UserError: no batch has any predictions.
        """
        of_batches = [self.scalars([log]) for log in logs]
        return {name: mean([scalars[name] for scalars in of_batches]) for name in of_batches[0]}

    def at_update(self, batch: Batch, update: int) -> Batch:
        """Return a training batch adapted to an update, such as with its masks; updates count from 0."""
        return batch

    def forget(self) -> None:  # noqa: B027
        """Discard any state left behind by an update that was skipped."""

    def task_state(self) -> dict[str, Any]:
        """Return the description of the heads that checkpoints store."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed training needs in addition to weights and batches."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the state of :meth:`state_dict` from a checkpoint's extra state."""


def dealt(batches: EpochBatches, processes: Processes) -> EpochBatches:
    """Restrict batches to this process's share, in place, and return them."""
    batches.shard = processes.rank
    batches.shards = processes.count
    return batches


def mean(scalars: Sequence[Scalar]) -> float:
    """Return the weighted mean of a scalar over batches, rounded to its digits.

    Raises:
        UserError: no batch has any predictions.
    """
    predicting = [scalar for scalar in scalars if scalar.weight]
    if not predicting:
        raise UserError(NOTHING_PREDICTED)
    total = sum(scalar.value * scalar.weight for scalar in predicting)
    return round(float(total / sum(scalar.weight for scalar in predicting)), predicting[0].digits)


def total(logs: Sequence[Log], name: str) -> Number:
    """Sum a logged number over batches."""
    return sum(log.get(name, 0) for log in logs)


def mean_per_prediction(logs: Sequence[Log], name: str, predictions: str = "sample_size") -> Number:
    """Return the mean per prediction of a logged sum, or 0 if the batches have no predictions.

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
