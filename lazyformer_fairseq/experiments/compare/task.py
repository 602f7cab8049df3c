"""What a task does for a comparison, and the training of one of its models."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Optional

from lazyformer_fairseq.experiments.compare.models import ModelSpec
from lazyformer_fairseq.experiments.compare.settings import CompareSettings
from lazyformer_fairseq.experiments.trainings import Job, Training
from lazyformer_fairseq.options import chosen, option, read_words
from lazyformer_fairseq.patterns.kinds import Sizes
from lazyformer_fairseq.training.loop import TrainingLoop
from lazyformer_fairseq.training.objectives.interface import Objective
from lazyformer_fairseq.training.optimization import OPTIMIZERS, SCHEDULES, OptimizationConfig, row_of

POINTS = 10  # of a curve
POINTS_OF_TRY = 2  # of a rate, of which the end counts; the other is where an interrupted try resumes
POINTS_LEAN = 1.5  # towards the start of a curve, where it is steep; 1 for equal steps


@dataclass(frozen=True, kw_only=True)
class CompareJob(Job):
    """The training of a model with a seed and a rate; its name is that of the results, such as ``mine@0.7``.

    Attributes:
        is_try: of a rate, shorter than a run.
    """

    spec: ModelSpec
    seed: int
    rate: float
    is_try: bool = False

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}, rate {self.rate:g}"


@dataclass
class Chosen:
    """What a user may change of a recipe."""

    optimizer: str = option(None, "", choices=tuple(OPTIMIZERS))
    lr_scheduler: str = option(None, "", choices=tuple(SCHEDULES))
    clip_norm: float = option(None, "", low=0)


class ComparedTask(ABC):
    """Trains and measures the models of one comparison.

    Args:
        settings: of the comparison.

    Attributes:
        OPTIONS: dataclasses of the options of its models and text, as fairseq-train takes them.
    """

    OPTIONS: ClassVar[tuple[type, ...]]

    def __init__(self, settings: CompareSettings):
        self.settings = settings

    def __reduce__(self) -> tuple:
        """To another process it goes without what it has loaded."""
        return type(self), (self.settings,)

    def open_training(self, job: Job) -> Training:
        return ComparedTraining(self, job)

    @abstractmethod
    def objective(self, spec: ModelSpec, seed: int, updates: int) -> Objective:
        """What a model learns in so many updates."""

    @abstractmethod
    def sizes(self, spec: ModelSpec, vocab_size: int = 0) -> Sizes:
        """Its sizes for formulas. Those of two models compare whatever the vocabulary is."""

    @abstractmethod
    def flops_of_update(self, spec: ModelSpec, vocab_size: int, length: int) -> int:
        """Counted on the model, of inputs of a length; a backward pass costs twice a forward pass."""

    def lengths(self, spec: ModelSpec) -> tuple[tuple[int, float], ...]:
        """Of inputs, and the share of the updates until which they have it."""
        return ((0, 1.0),)

    def phases(self, spec: ModelSpec, updates: int, begin: int = 0) -> list[tuple[int, range]]:
        """Of a training, the length of inputs and the updates, from 0, that have it; of those from `begin` on."""
        lengths = self.lengths(spec)
        ends = [begin, *(max(begin, math.ceil(end * updates)) for _, end in lengths)]
        return [(length, range(*of)) for (length, _), of in zip(lengths, pairwise(ends), strict=True)]

    def mean_flops(self, spec: ModelSpec, vocab_size: int) -> int:
        """Of an update, over a training."""
        lengths = self.lengths(spec)
        shares = pairwise((0.0, *(end for _, end in lengths)))
        found = [self.flops_of_update(spec, vocab_size, length) for length, _ in lengths]
        return round(sum(flops * (end - begin) for flops, (begin, end) in zip(found, shares, strict=True)))

    @abstractmethod
    def measure(self, training: TrainingLoop) -> dict[str, float]:
        """A point of the curve, the `loss` among it: on the same text for all models, seeds and points."""

    def final(self, training: Training) -> dict[str, float]:
        """What a run has in the end: the last point of its curve."""
        return {name: training.curve[name][-1] for name in ("loss", "accuracy")}

    @abstractmethod
    def describe_data(self) -> dict[str, Any]:
        """For the record."""

    def unit(self) -> dict[str, str]:
        """`unit`, where the data says what the measure is per."""
        return {}

    def costs_of_use(self, jobs: Mapping[str, CompareJob]) -> dict[str, dict[str, Any]]:
        """Further costs by name, of the models that the jobs have trained."""
        return {}

    def optimization(self, spec: ModelSpec, seed: int, rate: float, updates: int) -> OptimizationConfig:
        """How a model learns in so many updates: by the recipe, and what the user's further options say."""
        settings = self.settings
        recipe = self.settings.how_of(spec)
        schedule, schedule_options = recipe.schedule(rate, updates)
        named = {"optimizer": recipe.optimizer, "lr_scheduler": schedule, **self.given(Chosen, spec)}
        return OptimizationConfig(
            updates,
            rate,
            seed,
            optimizer=named["optimizer"],
            optimizer_options=self._options(OPTIMIZERS[named["optimizer"]][1], spec, recipe.options),
            schedule=named["lr_scheduler"],
            schedule_options=self._options(SCHEDULES[named["lr_scheduler"]][1], spec, schedule_options),
            clip_norm=named.get("clip_norm", recipe.options.get("clip_norm", settings.row.clip_norm)),
            precision=settings.precision,
            device=settings.device,
        )

    def _options(self, kind: type, spec: ModelSpec, of_recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the recipe that an optimizer or schedule has, models or text; and the user's."""
        return {**chosen(kind, of_recipe), **self.given(kind, spec)}

    def given(self, kind: type, spec: Optional[ModelSpec] = None) -> dict[str, Any]:
        """The user's further options of a dataclass, of all models and of this one, by name.

        Raises a UserError for an option that neither models, text, optimizer nor schedule of the comparison have.
        """
        words = self.settings.words_of(spec)
        by_name = dict(
            pairwise(part for word in words for part in (word.split("=", 1) if word[:2] == "--" else [word]))
        )
        recipe = self.settings.how_of(spec)
        schedule = recipe.schedule(0.0, 0)[0]
        rows = (("--optimizer", OPTIMIZERS, recipe.optimizer), ("--lr-scheduler", SCHEDULES, schedule))
        of_optimization = [row_of(flag, row, by_name.get(flag, usual))[1] for flag, row, usual in rows]
        found = read_words(words, *self.OPTIONS, Chosen, *of_optimization)
        return chosen(kind, found)

    def data_files(self) -> dict[str, Path]:
        """What the models read, for checksums, by a name that does not depend on where the data lies."""
        kinds = ("dict.txt", "train.*", "valid.*", "test.*")
        folders = self.data_folders()
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

    may_diverge = True

    def __init__(self, compared: ComparedTask, job: CompareJob):
        super().__init__(job)
        self.compared = compared
        self.points = frozenset(points(job.updates, POINTS_OF_TRY if job.is_try else POINTS))
        symbols = len(self.objective.dictionary)
        phases = compared.phases(job.spec, job.updates)
        self.flops = [(compared.flops_of_update(job.spec, symbols, length), made) for length, made in phases]

    def measure(self) -> Mapping[str, float]:
        found = self.compared.measure(self)
        flops = sum(flops * len(range(made.start, min(made.stop, self.updates))) for flops, made in self.flops)
        return {**found, "tokens": sum(self.tokens), "flops": flops}

    def is_due(self) -> bool:
        return self.updates in self.points

    def result(self) -> dict[str, Any]:
        final = self.compared.final(self)
        return {"rate": self.job.rate, "curve": self.curve, "final": final, "seconds": self.seconds}


def points(total: int, count: int) -> list[int]:
    """Updates at which a training of `total` is validated: `count` of them, the end among them, most of them early."""
    return sorted({max(1, round(total * (number / count) ** POINTS_LEAN)) for number in range(1, count + 1)})
