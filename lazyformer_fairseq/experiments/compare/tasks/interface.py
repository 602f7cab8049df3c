"""What a task does for a comparison."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq.tasks import FairseqTask
from torch import nn

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.experiments.compare.contestants import Contestant
from lazyformer_fairseq.experiments.compare.jobs import Job
from lazyformer_fairseq.experiments.compare.recipes import RECIPES
from lazyformer_fairseq.experiments.compare.settings import CompareSettings
from lazyformer_fairseq.patterns.sizes import Sizes


class ComparedTask(ABC):
    """Trains and measures the models of one comparison.

    Args:
        settings: of the comparison.
    """

    def __init__(self, settings: CompareSettings):
        self.settings = settings

    @abstractmethod
    def task_words(self) -> list[str]:
        """Options of fairseq-train that choose task, data and criterion; the data first."""

    @abstractmethod
    def model_words(self, contestant: Contestant) -> list[str]:
        """Options of fairseq-train that build the model."""

    @abstractmethod
    def sizes(self, contestant: Contestant, vocab_size: int = 0) -> Sizes:
        """Its sizes for formulas. Those of two models compare whatever the vocabulary is."""

    @abstractmethod
    def flops_of_update(self, contestant: Contestant, vocab_size: int) -> int:
        """By formula; a backward pass costs twice a forward pass."""

    @abstractmethod
    def measure(self, model: nn.Module, task: FairseqTask) -> dict[str, float]:
        """A point of the curve: on the same text for all models, seeds and points."""

    @abstractmethod
    def final(self, model: nn.Module, task: FairseqTask) -> dict[str, float]:
        """What a run has in the end."""

    @abstractmethod
    def describe_data(self) -> dict[str, Any]:
        """For the record."""

    def unit(self) -> dict[str, str]:
        """`unit`, where the data says what the measure is per."""
        return {}

    def costs_of_use(self, jobs: Mapping[str, Job]) -> dict[str, dict[str, Any]]:
        """Further costs by entry, of the models that the jobs have trained."""
        return {}

    def command(self, contestant: Contestant, seed: int, rate: float, updates: int) -> list[str]:
        """Arguments of the fairseq-train that trains a model, without its folder."""
        settings, recipe = self.settings, RECIPES[self.settings.recipe]
        return [
            *(*self.task_words(), "--user-dir", str(USER_DIR), *self.model_words(contestant)),
            *(*recipe.options.split(), "--clip-norm", str(settings.row.clip_norm)),
            *recipe.schedule(rate, settings.warmup_ratio, updates),
            *("--batch-size", str(settings.sizes["batch_size"]), "--max-update", str(updates), "--seed", str(seed)),
            *("--num-workers", "0", "--no-epoch-checkpoints"),
            *(["--cpu"] if settings.device == "cpu" else []),
            *([] if settings.precision == "fp32" else [f"--{settings.precision}"]),
            *settings.fairseq_options,
        ]

    def data_files(self) -> dict[str, Path]:
        """What the models read, for checksums, by a name that does not depend on where the data lies."""
        kinds, folders = ("dict.txt", "train.*", "valid.*", "test.*"), self.data_folders()
        return {
            path.name if len(folders) == 1 else f"{number}/{path.name}": path
            for number, folder in enumerate(folders)
            for kind in kinds
            for path in sorted(folder.glob(kind))
        }

    def data_folders(self) -> list[Path]:
        """Of the data; shards, where it has some."""
        return [Path(self.settings.data)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)
