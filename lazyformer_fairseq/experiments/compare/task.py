"""The part of a task in a comparison, and the training of one of its models."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Optional

import torch

from lazyformer_fairseq.data.shards import data_folders, read_word_counts
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.nvidia_smi import visible_gpus
from lazyformer_fairseq.executors.options import ExecutorOptions, choose_executor
from lazyformer_fairseq.experiments.compare.models import ModelSpec
from lazyformer_fairseq.experiments.compare.settings import CompareSettings
from lazyformer_fairseq.experiments.trainings import PRELOAD, Job, Training, threads_of_each, train
from lazyformer_fairseq.options import chosen, option, read_words
from lazyformer_fairseq.patterns.kinds import Sizes
from lazyformer_fairseq.training.loop import TrainingLoop
from lazyformer_fairseq.training.objectives.interface import Objective
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.optimization import OPTIMIZERS, SCHEDULES, OptimizationConfig, row_of
from lazyformer_fairseq.training.run_record import hash_data
from lazyformer_fairseq.training.words_read import WordCounter, refuse_too_many_words

DATA_FILES = ("dict.txt", "train.", "valid.", "test.")
POINTS = 10  # of a curve
POINTS_OF_TRY = 2  # of a rate, of which the end counts; the other is where an interrupted try resumes
POINTS_LEAN = 1.5  # towards the start of a curve, where it is steep; 1 for equal steps


@dataclass(frozen=True, kw_only=True)
class CompareJob(Job):
    """The training of a model with a seed and a rate; its name is that of the results, such as ``mine@0.7``.

    Attributes:
        spec: the model.
        seed: the seed of weights, order and dropout.
        rate: the highest learning rate.
        is_try: whether it tries a rate, in fewer updates than a run.
    """

    spec: ModelSpec
    seed: int
    rate: float
    is_try: bool = False

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}, rate {self.rate:g}"


@dataclass
class Chosen:
    """The parts of a recipe that a user may change."""

    optimizer: str = option(None, "", choices=tuple(OPTIMIZERS))
    lr_scheduler: str = option(None, "", choices=tuple(SCHEDULES))
    clip_norm: float = option(None, "", low=0)


class ComparedTask(ABC):
    """The task that the models of one comparison are trained and measured on.

    Args:
        settings: the settings of the comparison.

    Attributes:
        place: where trainings run that are alone.
        OPTIONS: dataclasses of the options of its models and text, as fairseq-train takes them.
    """

    OPTIONS: ClassVar[tuple[type, ...]]

    def __init__(self, settings: CompareSettings):
        self.settings = settings
        self.place = ExecutorOptions()

    def __reduce__(self) -> tuple:
        """Go to another process without what is loaded."""
        return type(self), (self.settings,)

    def train_at(self, place: ExecutorOptions) -> None:
        """Choose where trainings run.

        Raises:
            UserError: trainings take turns, which they do in this process.
        """
        if self.settings.in_turn and place != ExecutorOptions():
            raise UserError(
                "--executor, --workers, --slurm: choose where trainings run that are alone, and these take turns in "
                "one process; give --alone too, or leave them out"
            )
        self.place = place

    def train(self, jobs: Sequence[Job], description: str, training_class: Optional[type[Training]] = None) -> None:
        """Do the jobs that have no result yet, in turn or alone as the settings say.

        Args:
            jobs: trainings of models of this task.
            description: the label of the progress bar.
            training_class: the class of the trainings, by default that of a comparison.
        """
        if not jobs:
            return
        executor = None
        threads = torch.get_num_threads()
        if not self.settings.in_turn:
            gpus: list[str] = []
            if self.settings.device == "cuda":
                gpus = visible_gpus()
            threads = threads_of_each(self.place.workers or len(gpus))
            folder = jobs[0].folder.parent / "jobs"
            executor = choose_executor(self.place, folder, "lazyformer-training", threads, gpus, PRELOAD)
        train(jobs, partial(training_class or ComparedTraining, self), description, executor, threads)

    def objective(self, spec: ModelSpec, seed: int, updates: int) -> Objective:
        """Return the objective of a model for so many updates."""
        return self.objective_of(self.network(spec), self.training_text(spec), seed, updates)

    @abstractmethod
    def network(self, spec: ModelSpec) -> Network:
        """Return the part of the objective that builds the model."""

    @abstractmethod
    def training_text(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the options, by name, by which a model reads the training text."""

    @abstractmethod
    def objective_of(self, network: Network, text: Mapping[str, Any], seed: int, updates: int) -> Objective:
        """Return the objective of any network, and any options of the training text, for so many updates."""

    @abstractmethod
    def sizes(self, spec: ModelSpec, vocab_size: int = 0) -> Sizes:
        """Return a model's sizes for formulas; those of two models compare whatever the vocabulary is."""

    @abstractmethod
    def flops_of_update(self, spec: ModelSpec, vocab_size: int, length: int) -> int:
        """Count the FLOPs of an update on inputs of a length; a backward pass costs twice a forward pass."""

    def lengths(self, spec: ModelSpec) -> tuple[tuple[int, float], ...]:  # noqa: ARG002
        """Return the lengths of inputs, each with the share of the updates until which they have it."""
        return ((0, 1.0),)

    def phases(self, spec: ModelSpec, updates: int, begin: int = 0) -> list[tuple[int, range]]:
        """Return the lengths of inputs in a training, each with the updates that have it, of those from `begin` on."""
        phases = []
        for length, end in self.lengths(spec):
            last = max(begin, math.ceil(end * updates))
            phases.append((length, range(begin, last)))
            begin = last
        return phases

    def mean_flops(self, spec: ModelSpec, vocab_size: int) -> int:
        """Return the mean FLOPs of an update over a training."""
        mean = 0.0
        begin = 0.0
        for length, end in self.lengths(spec):
            mean += self.flops_of_update(spec, vocab_size, length) * (end - begin)
            begin = end
        return round(mean)

    @abstractmethod
    def measure(self, training: TrainingLoop) -> dict[str, float]:
        """Measure a point of the curve, `loss` among it: on the same text for all models, seeds and points."""

    def final(self, training: Training) -> dict[str, float]:
        """Return what a run has in the end: the last point of its curve."""
        return {name: training.curve[name][-1] for name in ("loss", "accuracy")}

    @abstractmethod
    def describe_data(self) -> dict[str, Any]:
        """Return facts about the data for the record: unigram losses, and what validation reads."""

    def unit(self) -> dict[str, str]:
        """Return the measure's `unit` where the data determines it."""
        return {}

    def costs_of_use(self, jobs: Mapping[str, CompareJob]) -> dict[str, dict[str, Any]]:  # noqa: ARG002
        """Measure further costs of the models that the jobs have trained, by name."""
        return {}

    def optimization(self, spec: ModelSpec, seed: int, rate: float, updates: int) -> OptimizationConfig:
        """Return how a model learns in so many updates: by the recipe and the user's further options."""
        settings = self.settings
        recipe = settings.recipe_of(spec)
        schedule, schedule_options = recipe.schedule(rate, updates)
        own = self.given(Chosen, spec)
        optimizer = own.get("optimizer", recipe.optimizer)
        schedule = own.get("lr_scheduler", schedule)
        clip_norm = recipe.options.get("clip_norm", settings.row.clip_norm)
        return OptimizationConfig(
            updates,
            rate,
            seed,
            optimizer=optimizer,
            optimizer_options=self._options(OPTIMIZERS[optimizer][1], spec, recipe.options),
            schedule=schedule,
            schedule_options=self._options(SCHEDULES[schedule][1], spec, schedule_options),
            clip_norm=own.get("clip_norm", clip_norm),
            precision=settings.precision,
            device=settings.device,
        )

    def _options(self, options_class: type, spec: ModelSpec, of_recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the recipe that a dataclass has, and the user's."""
        return {**chosen(options_class, of_recipe), **self.given(options_class, spec)}

    def given(self, options_class: type, spec: Optional[ModelSpec] = None) -> dict[str, Any]:
        """Return the user's further options of a dataclass, of all models and of this one, by name.

        Raises:
            UserError: neither models, text, optimizer nor schedule of the comparison have such an option.
        """
        words = self.settings.words_of(spec)
        parts: list[str] = []
        for word in words:
            if word.startswith("--"):
                parts += word.split("=", 1)
            else:
                parts.append(word)
        by_flag = dict(pairwise(parts))
        recipe = self.settings.recipe_of(spec)
        optimizer = by_flag.get("--optimizer", recipe.optimizer)
        schedule = by_flag.get("--lr-scheduler", recipe.schedule(0.0, 0)[0])
        optimizer_options = row_of("--optimizer", OPTIMIZERS, optimizer)[1]
        schedule_options = row_of("--lr-scheduler", SCHEDULES, schedule)[1]
        return chosen(options_class, read_words(words, *self.OPTIONS, Chosen, optimizer_options, schedule_options))

    @cached_property
    def words_per_token(self) -> float:
        """The words of the training text per token, about: without the token that begins a block."""
        return read_word_counts(self.settings.data).per_token

    @property
    def words_per_update(self) -> float:
        """Words of the training text per update, about."""
        sizes = self.settings.sizes
        longest = sizes.get("tokens_per_sample") or sizes["tgt_len"]
        return sizes["batch_size"] * longest * self.words_per_token

    def refuse_too_many_words(self, name: str, updates: int) -> None:
        """Raise a UserError for a training that would read more words than its budget allows."""
        budget = self.settings.word_budget
        if budget is None:
            return
        refuse_too_many_words(
            budget,
            words=updates * self.words_per_update,
            reader=name,
            length=f"its {updates:,} updates",
            remedy="fewer --updates",
        )

    def hash_data(self) -> dict[str, str]:
        """Return the SHA-256 of what the models read, by a name that does not depend on where the data lies."""
        folders = [Path(folder) for folder in data_folders(self.settings.data)]
        found = {}
        for number, folder in enumerate(folders):
            for path, sha256 in hash_data([folder]).items():
                name = Path(path).name
                if not name.startswith(DATA_FILES):
                    continue
                if len(folders) > 1:
                    name = f"{number}/{name}"
                found[name] = sha256
        return found


class ComparedTraining(Training):
    """The training of a model of a comparison, which adds tokens and FLOPs to each point of its curve."""

    may_diverge = True

    def __init__(self, compared: ComparedTask, job: CompareJob):
        super().__init__(job)
        self.compared = compared
        count = POINTS
        if job.is_try:
            count = POINTS_OF_TRY
        self.points = frozenset(points(job.updates, count))
        self.words_read = WordCounter(sum(self.tokens))
        marks = compared.settings.checkpoint_words
        if marks and not job.is_try:
            self.words_read = WordCounter(sum(self.tokens), marks, compared.words_per_token)
        symbols = len(self.objective.dictionary)
        phases = compared.phases(job.spec, job.updates)
        self.flops = [(compared.flops_of_update(job.spec, symbols, length), updates) for length, updates in phases]

    def measure(self) -> Mapping[str, float]:
        """Return the task's measures, and the tokens and FLOPs spent."""
        found = self.compared.measure(self)
        spent = 0
        for flops, updates in self.flops:
            spent += flops * len(range(updates.start, min(updates.stop, self.updates)))
        return {**found, "tokens": sum(self.tokens), "flops": spent}

    def update(self) -> int:
        """Train on one batch; keep the model where it has read as many words as were asked for."""
        tokens = super().update()
        for name in self.words_read.add(tokens):
            self.save(with_optimizer=False, name=f"{name}.pt")
        return tokens

    def is_due(self) -> bool:
        """Return whether this update is one of the points of the curve."""
        return self.updates in self.points

    def result(self) -> dict[str, Any]:
        """Return rate, curve, final measures, and the seconds of each update."""
        final = self.compared.final(self)
        return {"rate": self.job.rate, "curve": self.curve, "final": final, "seconds": self.seconds}


def points(total: int, count: int) -> list[int]:
    """Return the updates at which a training of `total` is validated: `count` of them, the end included, most early."""
    return sorted({max(1, round(total * (number / count) ** POINTS_LEAN)) for number in range(1, count + 1)})
