"""Task and criterion ``glue``: fine-tuning on classes or scores of texts and pairs (LazyFormer, appendix A, Table 5).

The texts come from official files of GLUE, or from a folder that ``lazyformer finetune`` or
``lazyformer diagnostics`` made. The loss is cross-entropy or squared error; metrics are computed over the whole split.
"""

import logging
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import register_task
from omegaconf import MISSING
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.data import prepared_folder
from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.encoding import read_examples
from lazyformer_fairseq.data.glue import TASKS, find_task
from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.prepared_folder import PreparedTask, load_prepared
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.metrics import METRICS
from lazyformer_fairseq.fairseq_plugin.reliability.options import option
from lazyformer_fairseq.finetuning import fairseq_task
from lazyformer_fairseq.modules.networks.heads import CLASSIFICATION_HEADS

logger = logging.getLogger(__name__)

MARKED_AT_ONCE = 32  # texts; the last digits of scores depend on it
BASELINE = "majority class or constant"


TASKS_TO_TRAIN = [name for name, task in TASKS.items() if "train" in task.splits]


@dataclass
class GlueConfig(fairseq_task.FineTuningConfig):
    data: str = option(MISSING, "folder of the task's official files, train.tsv and so on, or of the task as prepared")
    glue_task: Optional[str] = option(None, f"one of {', '.join(TASKS_TO_TRAIN)}; default: the data folder's name")
    # Not `max_positions`: the model has an option of that name already, and one option would set both.
    tokens_per_sample: Optional[int] = option(
        None, "longer inputs are cut to so many tokens, all counted; default: the model's positions"
    )
    glue_head_name: Optional[str] = option(None, "name of the classification head; default: the task's in lower case")
    glue_head: ChoiceEnum(list(CLASSIFICATION_HEADS)) = option(
        "dense",
        "on <s>: dense is RoBERTa's (two linear maps), linear is one; --pooler-dropout is the dropout",
    )
    max_train_rows: Optional[int] = option(None, "train on so many rows, drawn once for all seeds; default: on all")


@register_task("glue", dataclass=GlueConfig)
class GlueTask(fairseq_task.FineTuningTask):
    """Reads and encodes the files, adds the head to the model, and checks the options before anything is trained.

    Attributes:
        description: the task's row of the table.
        cut: rows that were cut, by the name of a split that was read.
    """

    cfg: GlueConfig

    def __init__(self, cfg: GlueConfig, description: TaskDescription, tokenizer_folder: Path):
        head_name, head = cfg.glue_head_name or description.head_name, (description.num_classes, str(cfg.glue_head))
        super().__init__(cfg, tokenizer_folder, head_name, head, cfg.tokens_per_sample)
        self.description = description
        self.cut: dict[str, int] = {}

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False):
        """Also has checkpoints keep what the head's classes are called."""
        model = super().build_model(cfg, from_checkpoint)
        row = replace(self.description, longest=self.longest).as_json()
        self.state.merge_state_dict({"heads": {self.head_name: row}})
        return model

    @classmethod
    def setup_task(cls, cfg: GlueConfig, **kwargs) -> "GlueTask":
        """Finds the task's row of the table and the tokenizer.

        Raises:
            UserError: an option that does not fit the task, or no tokenizer where it should be.
        """
        description = describe_task(cfg)
        if not kwargs.get("from_checkpoint"):
            check_task(cfg, description)
        prepared = load_prepared(cfg.data).tokenizer_folder if PreparedTask.is_at(cfg.data) else None
        task = cls(cfg, description, fairseq_task.find_tokenizer(cfg, prepared))
        kind = "scores" if description.is_regression else f"classes {', '.join(description.labels)}"
        size, folder = len(task.dictionary), task.tokenizer_folder
        logger.info("%s: %s; dictionary of %d symbols from %s", description.name, kind, size, folder)
        return task

    def read(self, split: str) -> LabelledTextsDataset:
        """A split: `train`, `valid`, `test`; MNLI also has `valid1` and `test1` (mismatched)."""
        examples = read_examples(self.description, self.cfg.data, split, self.tokenizer, self.longest)
        self.cut[split] = examples.cut
        if split == "train" and self.cfg.max_train_rows:
            examples = prepared_folder.draw_rows(examples, self.cfg.max_train_rows)
            logger.info("trained on %d rows", len(examples.inputs))
        marks = self.dictionary.eos() if self.marks_first_text else None
        return LabelledTextsDataset(examples.inputs, examples.targets, marks_before=marks, **self.order_of(split))

    @torch.no_grad()
    def marks(self, model: torch.nn.Module, criterion: "GlueCriterion", split: str) -> dict[str, float]:
        """Each metric over the split, from batches of :data:`MARKED_AT_ONCE` texts of like lengths."""
        dataset, device = self.dataset(split), next(model.parameters()).device
        rows = []
        for indices in dataset.batch_by_size(dataset.ordered_indices(), max_sentences=MARKED_AT_ONCE):
            batch = dataset.collater([dataset[index] for index in indices])
            rows.append(criterion(model, utils.move_to_cuda(batch) if device.type == "cuda" else batch)[2]["rows"])
        predictions, targets = np.concatenate(rows).T
        return {name: METRICS[name](predictions, targets) for name in self.description.metrics}

    def baselines(self, split: str) -> dict[str, dict[str, float]]:
        """The best answer of a model that has seen the training labels but no text."""
        seen, targets = (self.dataset(name).targets.numpy() for name in ("train", split))
        constant = seen.mean() if self.description.is_regression else np.bincount(seen).argmax()
        guesses = np.full(len(targets), constant)
        return {BASELINE: {name: METRICS[name](guesses, targets) for name in self.description.metrics}}


def describe_task(cfg: GlueConfig) -> TaskDescription:
    """The row of the task that the options, or the data folder's name, name; a prepared folder says what it holds.

    Raises:
        UserError: none is named.
    """
    if not cfg.glue_task and PreparedTask.is_at(cfg.data):
        return load_prepared(cfg.data).task
    try:
        return find_task(cfg.glue_task or Path(os.path.abspath(cfg.data)).name)
    except UserError as error:
        raise UserError(f"{error}; give one of them by --glue-task") from None


def check_task(cfg: GlueConfig, description: TaskDescription) -> None:
    """Raises a UserError for options that would fail late, or select the worst checkpoint."""
    fairseq_task.check_options(cfg, description.name, description.metrics)
    if PreparedTask.is_at(cfg.data) and load_prepared(cfg.data).task != description:
        raise UserError(f"{cfg.data}: holds {load_prepared(cfg.data).task.name}, not {description.name}")
    for split in cfg.valid_subset.split(","):
        if split in description.splits and description.splits[split].label is None:
            raise UserError(f"--valid-subset {cfg.valid_subset}: {description.name}'s split {split} has no labels")


@register_criterion("glue", dataclass=FairseqDataclass)
class GlueCriterion(fairseq_task.FineTuningCriterion):
    """Cross-entropy of classes, or squared error of scores; reads from the task ``glue`` which of them.

    GLUE's scores are regressed as they are in the file (STS-B: 0 to 5), as BERT and RoBERTa do; a user's own in
    standard deviations from their mean. In validation the row of an example is its prediction and its target.
    """

    NAME = "glue"

    def __init__(self, task: GlueTask):
        super().__init__(task)
        self.is_regression = task.description.is_regression
        self.mean, self.deviation = task.description.standard or (0.0, 1.0)
        self.metric_names = task.description.metrics

    def no_targets(self, sample: dict) -> str:
        return "the split has no labels to validate with; GLUE does not publish those of its test splits"

    def score(self, sample: dict, logits: Tensor) -> tuple[Tensor, dict]:
        """Summed loss of logits (B, classes)."""
        targets = sample["target"]
        if self.is_regression:
            predictions = logits.squeeze(-1)
            targets = (targets - self.mean) / self.deviation
            loss, log = F.mse_loss(predictions, targets.float(), reduction="sum"), {}
        else:
            predictions = torch.argmax(logits.detach(), dim=-1)
            loss, log = F.cross_entropy(logits, targets, reduction="sum"), {"ncorrect": (predictions == targets).sum()}
        if not self.training:
            log["rows"] = torch.stack([predictions.detach().double(), targets.double()], dim=1).cpu().numpy()
            log["metrics"] = self.metric_names
        return loss, log

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        """Logs the loss (bits an example, or squared error) and, in training, the accuracy of classes over all workers.

        In validation every metric of the task is logged, computed from all predictions of the split.
        """
        first, of_classes = logging_outputs[0], "ncorrect" in logging_outputs[0]
        fairseq_task.log_loss(logging_outputs, **({} if of_classes else {"unit": 1.0}))
        if "rows" in first:
            functions = {name: partial(_metric_of_rows, name) for name in first["metrics"]}
            fairseq_task.log_metrics(logging_outputs, functions)
        elif of_classes:
            correct, examples = (sum(log.get(key, 0) for log in logging_outputs) for key in ("ncorrect", "sample_size"))
            metrics.log_scalar("accuracy", correct / examples, examples, round=4)


def _metric_of_rows(name: str, rows: np.ndarray) -> float:
    return METRICS[name](*rows.T)
