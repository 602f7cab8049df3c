"""The fairseq criterions ``glue`` and ``squad``, which compute the loss and metrics of fine-tuning tasks."""

from functools import partial
from typing import Any, ClassVar

import numpy as np
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.logging.meters import MetersDict
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import log_scalars
from lazyformer_fairseq.fairseq_plugin.tasks.finetuning import FineTuningTask
from lazyformer_fairseq.training.objectives.head import HeadObjective
from lazyformer_fairseq.training.objectives.labelled_texts import LabelledTextsObjective
from lazyformer_fairseq.training.objectives.spans import SpansObjective


class FineTuningCriterion(FairseqCriterion):
    """The base class of the fine-tuning criterions, which report the head's loss and, during validation, task metrics.

    The metrics are computed from the `rows` that the objective logs for all examples of the split.

    Args:
        task: the fine-tuning task with the same name.

    Attributes:
        NAME: the name that the criterion and its task share.
        OBJECTIVE: the class of the task's objective.

    Raises:
        UserError: the task has a different name.
    """

    NAME: ClassVar[str]
    OBJECTIVE: ClassVar[type[HeadObjective]]

    def __init__(self, task: FineTuningTask):
        super().__init__(task)
        self.objective = getattr(task, "objective", None)
        if not isinstance(self.objective, self.OBJECTIVE):
            raise UserError(f"--criterion {self.NAME} works only with --task {self.NAME}, not {type(task).__name__}")

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Compute the loss of one batch.

        Returns:
            The summed loss, the number of examples, and the values to log. During validation these include `rows` and
            `metrics`, the names of the metrics to compute from all rows.

        Raises:
            UserError: the model has no head for the task, or the batch has no labels.
        """
        head_name = self.objective.head[0]
        if head_name not in getattr(model, "classification_heads", ()):
            raise UserError(
                f"the model has no head {head_name!r}; fine-tune the model with --task {self.NAME}, or pass the name "
                f"of its head with --{self.NAME}-head-name"
            )
        if "target" not in sample:
            raise UserError(self.no_targets(sample))
        loss, size, log = self.objective.loss(model, sample)
        if "rows" in log:
            log["metrics"] = self.objective.metric_names
        return loss, size, log

    def no_targets(self, sample: dict) -> str:
        """Return the error message for a batch without labels."""
        raise NotImplementedError

    def logging_outputs_can_be_summed(self) -> bool:
        """Return whether all logged values are numbers, which can be summed; validation also logs rows."""
        return self.training

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss over all workers, plus the accuracy during training or the task's metrics during validation."""
        scalars = cls.OBJECTIVE.scalars(logging_outputs)
        if "rows" not in logging_outputs[0]:
            log_scalars(scalars)
            return
        log_scalars({"loss": scalars["loss"]})
        for log in logging_outputs:
            metrics.log_custom(_RowsMeter, "_rows", log["rows"])

        def metric_of_rows(meters: MetersDict, name: str) -> float:
            rows = np.concatenate(meters["_rows"].rows)
            return cls.OBJECTIVE.metric(name, rows)

        for name in logging_outputs[0]["metrics"]:
            metrics.log_derived(name, partial(metric_of_rows, name=name))


class _RowsMeter(MetersDict._DerivedMeter):
    """A meter that accumulates the rows of a split batch by batch.

    fairseq does not print it, because its key starts with "_". It must be a derived meter: fairseq saves all other
    meters in checkpoints and, on resuming, looks up their classes only among its own. Nothing is lost, because each
    validation starts with an empty meter.
    """

    def __init__(self):
        self.rows: list[np.ndarray] = []

    def update(self, rows: np.ndarray) -> None:
        """Append a batch's rows."""
        self.rows.append(rows)


@register_criterion("glue", dataclass=FairseqDataclass)
class GlueCriterion(FineTuningCriterion):
    """The criterion for classification (cross-entropy) and regression (squared error)."""

    NAME = "glue"
    OBJECTIVE = LabelledTextsObjective

    def no_targets(self, sample: dict) -> str:
        """Return the error message for a batch without labels."""
        return "the split has no labels to validate with; GLUE does not publish the labels of its test splits"


@register_criterion("squad", dataclass=FairseqDataclass)
class SquadCriterion(FineTuningCriterion):
    """The criterion for answer spans: the mean of the start and end cross-entropies."""

    NAME = "squad"
    OBJECTIVE = SpansObjective

    def no_targets(self, sample: dict) -> str:
        """Return the error message for a batch without answers."""
        path = self.objective.dataset(sample["split"]).file.path
        return f"{path} contains questions without answers, which can be predicted but not used to train or validate"
