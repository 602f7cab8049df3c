"""fairseq's criterions ``glue`` and ``squad``: the loss and the metrics of a fine-tuning task's objective."""

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
    """The loss of a head, and metrics over the whole split from the rows that examples leave in validation.

    Attributes:
        NAME: the name of the criterion and of its task.
        OBJECTIVE: the class of the task's objective.
    """

    NAME: ClassVar[str]
    OBJECTIVE: ClassVar[type[HeadObjective]]

    def __init__(self, task: FineTuningTask):
        """Take the objective of a task.

        Raises:
            UserError: it is another task.
        """
        super().__init__(task)
        self.objective = getattr(task, "objective", None)
        if not isinstance(self.objective, self.OBJECTIVE):
            raise UserError(f"--criterion {self.NAME} works with --task {self.NAME} alone, not {type(task).__name__}")

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Compute the loss of one batch.

        Returns:
            The summed loss, the number of examples, and what to log: in validation also rows of numbers, and the
            names of the metrics that are made of all rows.

        Raises:
            UserError: the model has no head for the task, or the batch has no labels.
        """
        head_name = self.objective.head[0]
        if head_name not in getattr(model, "classification_heads", ()):
            raise UserError(
                f"the model has no head {head_name!r}; fine-tune it with --task {self.NAME}, or name the "
                f"head it has by --{self.NAME}-head-name"
            )
        if "target" not in sample:
            raise UserError(self.no_targets(sample))
        loss, size, log = self.objective.loss(model, sample)
        if "rows" in log:
            log["metrics"] = self.objective.metric_names
        return loss, size, log

    def no_targets(self, sample: dict) -> str:
        """Return what to tell a user whose split has no labels."""
        raise NotImplementedError

    def logging_outputs_can_be_summed(self) -> bool:
        """Return True in training, where outputs are numbers; False in validation, where they hold rows."""
        return self.training

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss and, in training, the accuracy of classes over all workers; in validation every metric."""
        scalars = cls.OBJECTIVE.scalars(logging_outputs)
        if "rows" not in logging_outputs[0]:
            log_scalars(scalars)
            return
        log_scalars({"loss": scalars["loss"]})
        for log in logging_outputs:
            metrics.log_custom(_RowsMeter, "_rows", log["rows"])
        for name in logging_outputs[0]["metrics"]:
            metrics.log_derived(
                name,
                lambda meters, name=name: cls.OBJECTIVE.metric(name, np.concatenate(meters["_rows"].rows)),
            )


class _RowsMeter(MetersDict._DerivedMeter):
    """Gathers rows batch by batch. Its key starts with "_", so fairseq prints no value of it.

    fairseq saves meters with a checkpoint, and looks for their classes among its own when it resumes. It leaves out
    meters of derived values, as it does this one: the next validation fills it anew.
    """

    def __init__(self):
        self.rows: list[np.ndarray] = []

    def update(self, rows: np.ndarray) -> None:
        """Add the rows of a batch."""
        self.rows.append(rows)


@register_criterion("glue", dataclass=FairseqDataclass)
class GlueCriterion(FineTuningCriterion):
    """Cross-entropy of classes, or squared error of scores."""

    NAME = "glue"
    OBJECTIVE = LabelledTextsObjective

    def no_targets(self, sample: dict) -> str:
        """Return what to tell a user whose split has no labels."""
        return "the split has no labels to validate with; GLUE does not publish those of its test splits"


@register_criterion("squad", dataclass=FairseqDataclass)
class SquadCriterion(FineTuningCriterion):
    """Half the cross-entropies of starts and ends."""

    NAME = "squad"
    OBJECTIVE = SpansObjective

    def no_targets(self, sample: dict) -> str:
        """Return what to tell a user whose questions have no answers."""
        path = self.objective.dataset(sample["split"]).file.path
        return f"{path}: has questions without an answer; they can be predicted, not trained on or marked"
