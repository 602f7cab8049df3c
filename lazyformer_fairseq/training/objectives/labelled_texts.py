"""Classes or scores of texts, of a task of GLUE by its official files or of one that was prepared."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.encoding import read_examples
from lazyformer_fairseq.data.glue import find_task
from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.data.prepared_folder import PreparedTask, load_prepared
from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.evaluation import checkpoints, match
from lazyformer_fairseq.evaluation.metrics import METRICS
from lazyformer_fairseq.modules import losses
from lazyformer_fairseq.training.objectives.interface import (
    Batch,
    Log,
    Objective,
    Scalar,
    in_bits,
    mean_per_prediction,
    total,
)
from lazyformer_fairseq.training.objectives.network import Network


@dataclass
class LabelledTextsObjective(Objective):
    """Classification or regression of texts and pairs of texts.

    Attributes:
        network: the model.
        data: a folder of a task's official files, or of the task as prepared.
        batch_size: texts per batch.
        seed: the seed of the order.
        task: the task's name in GLUE; None for what the folder holds.
        begins_with: a checkpoint whose weights the model starts from.
        batch_size_valid: texts per validation batch; by default as in training.
    """

    network: Network
    data: str
    batch_size: int
    seed: int
    task: Optional[str] = None
    begins_with: Optional[Path] = None
    batch_size_valid: Optional[int] = None
    CRITERION: ClassVar[str] = "GlueCriterion"

    @cached_property
    def description(self) -> TaskDescription:
        """The task's row of the table."""
        return find_task(self.task) if self.task else load_prepared(self.data).task

    @cached_property
    def tokenizer_folder(self) -> Path:
        """The tokenizer of prepared data, else the one beside the checkpoint."""
        if PreparedTask.is_at(self.data):
            return load_prepared(self.data).tokenizer_folder
        return self.begins_with.parent / "tokenizer"

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The loaded tokenizer."""
        return load_tokenizer(self.tokenizer_folder)

    @property
    def dictionary(self) -> Dictionary:
        """The symbols of inputs."""
        return self.tokenizer.dictionary

    def build_model(self) -> nn.Module:
        """Build the model with the task's head, and with the weights that it starts from."""
        model = self.network.build(self.dictionary)
        model.register_classification_head(self.description.head_name, self.description.num_classes)
        if self.begins_with is not None:
            match.load_weights(model, checkpoints.load(self.begins_with)["model"])
        self.longest = model.max_positions()
        self._has_token_types = model.cfg.token_types > 1
        self._marks_first_text = bool(model.encoder.sentence_encoder.asking)
        return model

    def dataset(self, split: str) -> LabelledTextsDataset:
        """Return a split, as the model that was built reads it."""
        examples = read_examples(self.description, self.data, split, self.tokenizer, self.longest)
        eos = self.dictionary.eos()
        return LabelledTextsDataset(
            examples.inputs,
            examples.targets,
            pad=self.dictionary.pad(),
            shuffle=split == "train",
            seed=self.seed,
            types_after=eos if self._has_token_types else None,
            marks_before=eos if self._marks_first_text else None,
        )

    def batches(self) -> EpochBatches:
        """Return the training batches."""
        return EpochBatches(self.dataset("train"), self.batch_size, seed=self.seed)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the loss of the labels; see :func:`labels_loss`."""
        return labels_loss(model, batch, self.description, self.description.head_name)

    @staticmethod
    def scalars(logs: Sequence[Log]) -> dict[str, Scalar]:
        """Return `loss`, in bits per example or as squared error, and the accuracy of classes, a share."""
        examples = total(logs, "sample_size")
        loss = mean_per_prediction(logs, "loss")
        if "ncorrect" not in logs[0]:
            return {"loss": Scalar(loss, examples)}
        accuracy = mean_per_prediction(logs, "ncorrect")
        return {"loss": Scalar(in_bits(loss), examples), "accuracy": Scalar(accuracy, examples, digits=4)}

    def measures(self, logs: Sequence[Log]) -> dict[str, float]:
        """Return the loss, and the task's metrics of the whole split."""
        predictions, targets = torch.cat([log["rows"] for log in logs]).cpu().numpy().T
        found = {name: METRICS[name](predictions, targets) for name in self.description.metrics}
        return {**found, "loss": super().measures(logs)["loss"]}

    def held_out(self, split: str) -> EpochBatches:
        """Return the batches of a split, in order."""
        return EpochBatches(self.dataset(split), self.batch_size_valid or self.batch_size, shuffle=False)

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings that checkpoints keep."""
        task = {"_name": "glue", "data": self.data, "glue_task": self.description.name, "seed": self.seed}
        return {"model": self.network.settings(), "task": task, "criterion": {"_name": "glue"}}

    def task_state(self) -> dict[str, Any]:
        """Return what the head's classes are called."""
        row = replace(self.description, longest=self.longest)
        return {"heads": {row.head_name: row.as_json()}}


def labels_loss(
    model: nn.Module, batch: Batch, task: TaskDescription, head_name: str
) -> tuple[Tensor, int, dict[str, Any]]:
    """Compute the summed cross-entropy of classes, or squared error of scores, plus the loss that keeps experts busy.

    GLUE's scores are regressed as they are in the file (STS-B: 0 to 5), as BERT and RoBERTa do; a user's own in
    standard deviations from their mean.

    Returns:
        The loss, the number of examples, and what to log; in evaluation mode also `rows`, float64 (B, 2): each
        example's prediction and target.
    """
    targets = batch["target"]
    logits = model(**batch["net_input"], classification_head_name=head_name)[0].float()
    if task.is_regression:
        mean, deviation = task.standard or (0.0, 1.0)
        predictions = logits.squeeze(-1)
        targets = (targets - mean) / deviation
        loss = F.mse_loss(predictions, targets.float(), reduction="sum")
        log = {}
    else:
        predictions = logits.detach().argmax(dim=-1)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        log = {"ncorrect": (predictions == targets).sum()}

    if not model.training:
        log["rows"] = torch.stack([predictions.detach().double(), targets.double()], dim=1)
    size = len(targets)
    log |= {"loss": loss.detach(), "ntokens": batch["ntokens"], "nsentences": batch["nsentences"], "sample_size": size}
    return losses.with_experts(model, loss, size, log), size, log
