"""Text classification and regression on the official files of a GLUE task or on a prepared task."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Optional

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.encoding import read_examples
from lazyformer_fairseq.data.glue import find_task
from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.prepared_folder import PreparedTask, load_prepared, sample_examples
from lazyformer_fairseq.evaluation.metrics import METRICS
from lazyformer_fairseq.training.objectives.head import HeadObjective
from lazyformer_fairseq.training.objectives.interface import (
    Batch,
    Log,
    Scalar,
    in_bits,
    mean_per_prediction,
    total,
)


@dataclass(kw_only=True)
class LabelledTextsObjective(HeadObjective):
    """Objective for classification or regression of texts or text pairs.

    GLUE's regression targets are used unscaled (STS-B: 0 to 5), as in BERT and RoBERTa. The regression targets of
    custom tasks are standardized to mean 0 and standard deviation 1.

    Attributes:
        data: the folder with the task's official files or the prepared task.
        task: the name of a GLUE task; None for the prepared task in the folder.
        head_type: ``dense`` for RoBERTa's two-layer head, or ``linear``.
        head_name: the head's name; None for the task's name.
        max_train_rows: the number of rows to train on; all seeds use the same rows. None for all rows.
        tokenizer_folder: the tokenizer's folder; None for the prepared task's tokenizer or, if `data` is not a prepared
            task, the one next to the checkpoint.
        cut: the number of truncated rows, by split.
    """

    data: str
    task: Optional[str] = None
    head_type: str = "dense"
    head_name: Optional[str] = None
    max_train_rows: Optional[int] = None
    tokenizer_folder: Optional[Path] = None
    cut: dict[str, int] = field(default_factory=dict)
    CRITERION: ClassVar[str] = "GlueCriterion"
    DATASET: ClassVar[type[LabelledTextsDataset]] = LabelledTextsDataset

    def __post_init__(self) -> None:
        if self.tokenizer_folder is not None:
            return
        if PreparedTask.is_at(self.data):
            self.tokenizer_folder = load_prepared(self.data).tokenizer_folder
        elif self.begins_with is not None:
            self.tokenizer_folder = self.begins_with.parent / "tokenizer"

    @cached_property
    def description(self) -> TaskDescription:
        """The task's description, from the table of GLUE tasks or from the prepared task."""
        if self.task:
            return find_task(self.task)
        return load_prepared(self.data).task

    @property
    def head(self) -> tuple[str, int, str]:
        """The head's name, its number of outputs, and its type."""
        return self.head_name or self.description.head_name, self.description.num_classes, self.head_type

    def dataset(self, split: str) -> LabelledTextsDataset:
        """Load a split: `train`, `valid` or `test`, or MNLI's mismatched `valid1` or `test1`."""
        examples = read_examples(self.description, self.data, split, self.tokenizer, self.longest)
        self.cut[split] = examples.cut
        if split == "train" and self.max_train_rows:
            examples = sample_examples(examples, self.max_train_rows)
        if self.marks_first_text:
            marks_before = self.dictionary.eos()
        else:
            marks_before = None
        return self.DATASET(
            examples.inputs,
            examples.targets,
            global_attention_eos=marks_before,
            **self.dataset_options(split),
        )

    def data_folders(self) -> list[Path]:
        """Return the data folder."""
        return [Path(self.data)]

    def score(self, batch: Batch, logits: Tensor, training: bool) -> tuple[Tensor, dict[str, Any]]:
        """Return the summed loss of logits (B, classes), and additional values to log.

        The loss is cross-entropy for classification and the squared error for regression. For multi-label tasks it is
        the binary cross-entropy, averaged over each text's labels. In evaluation mode, `rows` contains each example's
        prediction and target, float64 (B, 2), or, for multi-label tasks, L predictions and L targets, (B, 2 L).
        """
        targets = batch["target"]
        log = {}
        if self.description.is_regression:
            mean, deviation = self.description.standard or (0.0, 1.0)
            targets = (targets - mean) / deviation
            predictions = logits.squeeze(-1)
            loss = F.mse_loss(predictions, targets.float(), reduction="sum")
        elif self.description.is_multi_label:
            predictions = logits.detach() > 0
            loss_of_labels = F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none")
            loss = loss_of_labels.mean(dim=-1).sum()
            log["ncorrect"] = (predictions == targets).all(dim=-1).sum()
        else:
            predictions = logits.detach().argmax(dim=-1)
            loss = F.cross_entropy(logits, targets, reduction="sum")
            log["ncorrect"] = (predictions == targets).sum()
        if not training:
            both = [each.detach().double().reshape(len(logits), -1) for each in (predictions, targets)]
            log["rows"] = torch.cat(both, dim=1).cpu().numpy()
        return loss, log

    @staticmethod
    def scalars(logs: Sequence[Log]) -> dict[str, Scalar]:
        """Return `loss`, in bits or squared error per example, and `accuracy`, the fraction of correct examples."""
        examples = total(logs, "sample_size")
        loss = mean_per_prediction(logs, "loss")
        if "ncorrect" not in logs[0]:
            return {"loss": Scalar(loss, examples)}
        accuracy = mean_per_prediction(logs, "ncorrect")
        return {"loss": Scalar(in_bits(loss), examples), "accuracy": Scalar(accuracy, examples, digits=4)}

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the task's metrics."""
        return self.description.metrics

    @staticmethod
    def metric(name: str, rows: np.ndarray) -> float:
        """Compute a split's metric from its rows of predictions and targets."""
        predictions, targets = np.hsplit(rows, 2)
        if rows.shape[1] == 2:
            return METRICS[name](predictions.ravel(), targets.ravel())
        return METRICS[name](predictions, targets)

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings to store in checkpoints."""
        task = {
            "_name": "glue",
            "data": self.data,
            "glue_task": None if self.description.is_custom else self.description.name,
            "glue_head_name": self.head_name,
            "glue_head": self.head_type,
            "tokens_per_sample": self.longest,
            "max_train_rows": self.max_train_rows,
            "no_padding": self.no_padding,
            "seed": self.seed,
        }
        return {"model": self.own_network.settings(), "task": task, "criterion": {"_name": "glue"}}

    def task_state(self) -> dict[str, Any]:
        """Return the head's description, including its class names."""
        row = replace(self.description, longest=self.longest)
        return {"heads": {self.head[0]: row.as_json()}}
