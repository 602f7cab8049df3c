"""Classes or scores of texts, of a task of GLUE by its official files or of one that was prepared."""

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
from lazyformer_fairseq.data.prepared_folder import PreparedTask, draw_rows, load_prepared
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
    """Classification or regression of texts and pairs of texts.

    GLUE's scores are regressed as they are in the file (STS-B: 0 to 5), as BERT and RoBERTa do; a user's own in
    standard deviations from their mean.

    Attributes:
        data: a folder of a task's official files, or of the task as prepared.
        task: the task's name in GLUE; None for what the folder holds.
        head_type: ``dense``, RoBERTa's two linear maps, or ``linear``.
        head_name: the head's name; by default the task's.
        max_train_rows: rows to train on, the same for all seeds; None for all.
        tokenizer_folder: by default the one of prepared data, else the one beside the checkpoint.
        cut: rows that were cut, by the name of a split that was read.
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
        """The task's row of the table."""
        if self.task:
            return find_task(self.task)
        return load_prepared(self.data).task

    @property
    def head(self) -> tuple[str, int, str]:
        """The head's name, its number of outputs, and its type."""
        return self.head_name or self.description.head_name, self.description.num_classes, self.head_type

    def dataset(self, split: str) -> LabelledTextsDataset:
        """Read a split: `train`, `valid`, `test`; MNLI also has `valid1` and `test1` (mismatched)."""
        examples = read_examples(self.description, self.data, split, self.tokenizer, self.longest)
        self.cut[split] = examples.cut
        if split == "train" and self.max_train_rows:
            examples = draw_rows(examples, self.max_train_rows)
        if self.marks_first_text:
            marks_before = self.dictionary.eos()
        else:
            marks_before = None
        return self.DATASET(
            examples.inputs,
            examples.targets,
            marks_before=marks_before,
            **self.dataset_options(split),
        )

    def data_folders(self) -> list[Path]:
        """Return the folder that the data is read from."""
        return [Path(self.data)]

    def score(self, batch: Batch, logits: Tensor, training: bool) -> tuple[Tensor, dict[str, Any]]:
        """Return the summed cross-entropy of classes, or squared error of scores, of logits (B, classes).

        Where texts have several labels, it is the sum over texts of the mean binary cross-entropy of labels. In
        evaluation `rows` holds each example's prediction and target, float64 (B, 2), or those per label (B, 2 L).
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
            loss = F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none").mean(dim=-1).sum()
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
        """Return `loss`, in bits per example or as squared error, and the share of examples whose labels are right."""
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
        """Compute a metric of the whole split."""
        predictions, targets = np.hsplit(rows, 2)
        if rows.shape[1] == 2:
            return METRICS[name](predictions.ravel(), targets.ravel())
        return METRICS[name](predictions, targets)

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings that checkpoints keep."""
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
        """Return the names of the head's classes."""
        row = replace(self.description, longest=self.longest)
        return {"heads": {self.head[0]: row.as_json()}}
