"""Criterion ``glue``: cross-entropy or squared error, and the task's metrics over the whole split."""

import math
from functools import partial

import numpy as np
import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.logging.meters import MetersDict
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.data.glue.metrics import METRICS
from lazyformer_fairseq.errors import UserError


@register_criterion("glue", dataclass=FairseqDataclass)
class GlueCriterion(FairseqCriterion):
    """Reads the head, and whether to predict classes or scores, from the task ``glue``.

    Scores are regressed as they are in the file (STS-B: 0 to 5), as BERT and RoBERTa do.

    Raises:
        UserError: the task is another than ``glue``.
    """

    def __init__(self, task):
        super().__init__(task)
        if not hasattr(task, "description"):
            raise UserError(f"--criterion glue works with --task glue alone, not with {type(task).__name__}")
        self.head_name = task.head_name
        self.is_regression = task.description.is_regression
        self.metric_names = task.description.metrics

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Loss of one batch.

        Returns:
            The summed loss (nats, or squared error), the number of examples (the gradient's denominator), and what to
            log: in validation also every prediction and target.

        Raises:
            UserError: the model has no head for the task, or the batch has no labels.
        """
        self._check(model, sample)
        logits, _ = model(**sample["net_input"], classification_head_name=self.head_name)
        targets = sample["target"]
        loss, predictions = self._score(logits.float(), targets)
        logging_output = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": targets.numel(),
        }
        if not self.is_regression:
            logging_output["ncorrect"] = (predictions == targets).sum()
        if not self.training:
            logging_output["predictions"] = predictions.cpu().numpy()
            logging_output["targets"] = targets.cpu().numpy()
            logging_output["metrics"] = self.metric_names
        return loss, targets.numel(), logging_output

    def _check(self, model, sample: dict) -> None:
        if self.head_name not in getattr(model, "classification_heads", ()):
            raise UserError(
                f"the model has no classification head {self.head_name!r}; fine-tune it for the task with "
                f"--task glue --glue-task {self.task.description.name}, or name the head it has by --glue-head-name"
            )
        if "target" not in sample:
            raise UserError("the split has no labels to validate with; GLUE does not publish those of its test splits")

    def _score(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss, and predictions (B,): classes or scores, from logits (B, classes)."""
        if self.is_regression:
            scores = logits.squeeze(-1)
            return F.mse_loss(scores, targets.float(), reduction="sum"), scores.detach()
        return F.cross_entropy(logits, targets, reduction="sum"), torch.argmax(logits.detach(), dim=-1)

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        """Logs the loss (bits an example, or squared error) and, in training, the accuracy of classes over all workers.

        In validation every metric of the task is logged, computed from all predictions of the split.
        """
        totals = {key: sum(log.get(key, 0) for log in logging_outputs) for key in ("loss", "ncorrect", "sample_size")}
        examples = totals["sample_size"]
        of_classes = "ncorrect" in logging_outputs[0]
        nats = math.log(2) if of_classes else 1.0
        metrics.log_scalar("loss", totals["loss"] / examples / nats, examples, round=3)
        if "predictions" not in logging_outputs[0]:
            if of_classes:
                metrics.log_scalar("accuracy", totals["ncorrect"] / examples, examples, round=4)
            return
        for log in logging_outputs:
            metrics.log_custom(_SplitMeter, "_split", log["predictions"], log["targets"])
        for name in logging_outputs[0]["metrics"]:
            metrics.log_derived(name, partial(_metric_of_split, name))

    def logging_outputs_can_be_summed(self) -> bool:
        """True in training, where outputs are numbers; False in validation, where they hold predictions."""
        return self.training


class _SplitMeter(MetersDict._DerivedMeter):
    """Gathers predictions and targets batch by batch. Its key starts with "_", so fairseq prints no value of it.

    fairseq saves meters with a checkpoint, and looks for their classes among its own when it resumes. It leaves out
    meters of derived values, as it does this one: the next validation fills it anew.
    """

    def __init__(self):
        self.predictions: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []

    def update(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        self.predictions.append(predictions)
        self.targets.append(targets)


def _metric_of_split(name: str, meters: MetersDict) -> float:
    split = meters["_split"]
    return METRICS[name](np.concatenate(split.predictions), np.concatenate(split.targets))
