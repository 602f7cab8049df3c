"""What a task does for a comparison, and the training of one of its models."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.experiments.compare.models import ModelSpec
from lazyformer_fairseq.experiments.compare.settings import RECIPES, CompareSettings
from lazyformer_fairseq.experiments.trainings import Job, Training
from lazyformer_fairseq.measure.stepwise import StepwiseTraining
from lazyformer_fairseq.patterns.kinds import Sizes

POINTS = 10  # of a curve
POINTS_LEAN = 1.5  # towards the start of a curve, where it is steep; 1 for equal steps


@dataclass(frozen=True, kw_only=True)
class CompareJob(Job):
    """The training of a model with a seed and a rate; its name is that of the results, such as ``mine@0.7``.

    Attributes:
        before: what must be over first, such as self-pretraining.
    """

    spec: ModelSpec
    seed: int
    rate: float
    before: Optional[Job] = None

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}, rate {self.rate:g}"


class ComparedTask(ABC):
    """Trains and measures the models of one comparison.

    Args:
        settings: of the comparison.
    """

    def __init__(self, settings: CompareSettings):
        self.settings = settings

    def __reduce__(self) -> tuple:
        """To another process it goes without what it has loaded."""
        return type(self), (self.settings,)

    def open_training(self, job: Job) -> Training:
        return ComparedTraining(self, job)

    def pretraining(self, spec: ModelSpec, seed: int, folder: Path) -> Optional[Job]:
        """What a model learns before the task itself, in a folder of its own; None for nothing."""
        return None

    @abstractmethod
    def task_words(self) -> list[str]:
        """Options of fairseq-train that choose task, data and criterion; the data first."""

    @abstractmethod
    def model_words(self, spec: ModelSpec) -> list[str]:
        """Options of fairseq-train that build the model."""

    @abstractmethod
    def sizes(self, spec: ModelSpec, vocab_size: int = 0) -> Sizes:
        """Its sizes for formulas. Those of two models compare whatever the vocabulary is."""

    @abstractmethod
    def flops_of_update(self, spec: ModelSpec, vocab_size: int) -> int:
        """Counted on the model; a backward pass costs twice a forward pass."""

    @abstractmethod
    def measure(self, training: StepwiseTraining) -> dict[str, float]:
        """A point of the curve, the `loss` among it: on the same text for all models, seeds and points."""

    def final(self, training: StepwiseTraining) -> dict[str, float]:
        """What a run has in the end."""
        return self.measure(training)

    @abstractmethod
    def describe_data(self) -> dict[str, Any]:
        """For the record."""

    def unit(self) -> dict[str, str]:
        """`unit`, where the data says what the measure is per."""
        return {}

    def costs_of_use(self, jobs: Mapping[str, CompareJob]) -> dict[str, dict[str, Any]]:
        """Further costs by name, of the models that the jobs have trained."""
        return {}

    def command(self, spec: ModelSpec, seed: int, rate: float, updates: int, words: Sequence[str] = ()) -> list[str]:
        """Arguments of the fairseq-train that trains a model, without its folder.

        Args:
            words: in place of those of the task.
        """
        settings, recipe = self.settings, RECIPES[self.settings.recipe]
        return [
            *(*(words or self.task_words()), "--user-dir", str(USER_DIR), *self.model_words(spec)),
            *(*recipe.options.split(), "--clip-norm", str(settings.row.clip_norm)),
            *recipe.schedule(rate, updates),
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


class ComparedTraining(Training):
    """The training of a model of a comparison."""

    def __init__(self, compared: ComparedTask, job: CompareJob):
        super().__init__(job)
        self.compared = compared
        self.points = frozenset(points(job.updates, POINTS))
        self.flops_of_update = compared.flops_of_update(job.spec, len(self.task.source_dictionary))

    def measure(self) -> Mapping[str, float]:
        found = self.compared.measure(self)
        return {**found, "tokens": sum(self.tokens), "flops": self.updates * self.flops_of_update}

    def is_due(self) -> bool:
        return self.updates in self.points

    def result(self) -> dict[str, Any]:
        final = self.compared.final(self)
        return {"rate": self.job.rate, "curve": self.curve, "final": final, "seconds": self.seconds}


def points(total: int, count: int) -> list[int]:
    """Updates at which a training of `total` is validated: `count` of them, the end among them, most of them early."""
    return sorted({max(1, round(total * (number / count) ** POINTS_LEAN)) for number in range(1, count + 1)})


def unigram_bits(tokens: np.ndarray) -> float:
    """Entropy of the tokens' own frequencies, bits a token."""
    shares = np.bincount(tokens) / len(tokens)
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())
