"""The interface between an objective and the trainers that run it, and the scalars that they log."""

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
Log = Mapping[str, Any]  # sums over a batch, by name
Number = Union[int, float, Tensor]

NOTHING_PREDICTED = "no token of the validation text is predicted, since it is too short; give more validation text"


@dataclass(frozen=True)
class Scalar:
    """A logged number.

    Attributes:
        value: the mean over the predictions of one or several batches.
        weight: the number of predictions, by which values of several updates are averaged.
        digits: the decimals that logs and results show.
    """

    value: Number
    weight: Number
    digits: int = 3


class Objective(ABC):
    """A model's task: the model, the batches, the loss and its metrics. One object serves one training.

    Attributes:
        network: the model; None where another trainer builds it.
        dictionary: the symbols of inputs and targets.
        batch_size: inputs per batch.
        tokenizer_folder: the tokenizer to keep beside checkpoints; None where there is none.
        CRITERION: the name of the loss in checkpoints.
    """

    network: Optional[Network]
    dictionary: Any
    batch_size: int
    tokenizer_folder: Optional[Path] = None
    CRITERION: ClassVar[str] = ""

    @property
    def own_network(self) -> Network:
        """The network of an objective that builds its model itself."""
        assert self.network is not None
        return self.network

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model, with fresh weights or those the objective begins with; called once, before all else."""

    @abstractmethod
    def batches(self, processes: Processes = ALONE) -> EpochBatches:
        """Return the training batches; where several processes share each update, those of this one."""

    @abstractmethod
    def data_folders(self) -> list[Path]:
        """Return the folders that the data is read from."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Number, dict[str, Any]]:
        """Compute the loss of a batch.

        Returns:
            The summed loss, penalties included; the number of predictions, which the gradient is divided by; and sums
            to log, among them the `loss` without penalties.
        """

    @staticmethod
    @abstractmethod
    def scalars(logs: Sequence[Log]) -> dict[str, Scalar]:
        """Return what is logged of the batches of one update, all processes' together, or of one validation batch."""

    @abstractmethod
    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of `model`, `task` and `criterion`, as checkpoints keep them."""

    def held_out(self, split: str) -> Iterable[Batch]:
        """Return the batches of a split, in order; streams have none here and are evaluated elsewhere."""
        raise NotImplementedError

    def measures(self, logs: Sequence[Log]) -> dict[str, float]:
        """Return the metrics of a split from the logs of all its batches.

        Raises:
            UserError: no batch predicts anything.
        """
        of_batches = [self.scalars([log]) for log in logs]
        return {name: mean([scalars[name] for scalars in of_batches]) for name in of_batches[0]}

    def at_update(self, batch: Batch, update: int) -> Batch:
        """Return a training batch as the update of this number, from 0, reads it."""
        return batch

    def forget(self) -> None:  # noqa: B027
        """Drop what an update that was skipped has left behind."""

    def task_state(self) -> dict[str, Any]:
        """Return what checkpoints keep about heads."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs besides weights and batches."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore that state from a checkpoint's extra state."""


def dealt(batches: EpochBatches, processes: Processes) -> EpochBatches:
    """Return batches, of which this process reads its share."""
    batches.shard = processes.rank
    batches.shards = processes.count
    return batches


def mean(scalars: Sequence[Scalar]) -> float:
    """Return the weighted mean of a scalar over batches, rounded to its digits.

    Raises:
        UserError: no batch predicts anything.
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
    """Return the mean of a logged sum; 0, which has no weight, where the batches predict nothing."""
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
