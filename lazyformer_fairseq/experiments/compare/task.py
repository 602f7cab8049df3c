"""The base class of the tasks that models are compared on, and the training loop for one compared model."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from lazyformer_fairseq.experiments.training_runs import PRELOAD, Job, Training, threads_per_run, train
from lazyformer_fairseq.options import option, parse_arguments, select_options
from lazyformer_fairseq.patterns.kinds import Sizes
from lazyformer_fairseq.training.loop import TrainingLoop
from lazyformer_fairseq.training.objectives.interface import Objective
from lazyformer_fairseq.training.objectives.network import Network
from lazyformer_fairseq.training.optimization import OPTIMIZERS, SCHEDULES, OptimizationConfig, row_of
from lazyformer_fairseq.training.run_record import hash_data
from lazyformer_fairseq.training.word_counter import WordCounter, refuse_too_many_words

DATA_FILES = ("dict.txt", "train.", "valid.", "test.")
POINTS = 10  # number of points on a curve
POINTS_OF_TRY = 2  # of a learning-rate trial; only the last counts, and the other lets an interrupted trial resume
POINTS_EXPONENT = 1.5  # above 1, so that points are denser at the steep start of a curve


@dataclass(frozen=True, kw_only=True)
class CompareJob(Job):
    """The training run of one model with one seed and one learning rate.

    The job's name is the model's name in the results, such as ``mine@0.7``.

    Attributes:
        spec: the model.
        seed: the seed of the initial weights, the data order, and dropout.
        rate: the peak learning rate.
        is_try: whether the job is a learning-rate trial that is shorter than a run.
    """

    spec: ModelSpec
    seed: int
    rate: float
    is_try: bool = False

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}, rate {self.rate:g}"


@dataclass
class RecipeOverrides:
    """The recipe options that a user may override."""

    optimizer: str = option(None, "", choices=tuple(OPTIMIZERS))
    lr_scheduler: str = option(None, "", choices=tuple(SCHEDULES))
    clip_norm: float = option(None, "", low=0)


class ComparedTask(ABC):
    """A task that the models in a comparison are trained and evaluated on.

    Args:
        settings: the comparison's settings.

    Attributes:
        place: the executor options for runs in separate processes.
        report_to: names of the experiment trackers for all runs.
        OPTIONS: dataclasses with the options of the task's models and text, named as in fairseq-train.
    """

    OPTIONS: ClassVar[tuple[type, ...]]

    def __init__(self, settings: CompareSettings):
        self.settings = settings
        self.place = ExecutorOptions()
        self.report_to: tuple[str, ...] = ()

    def __reduce__(self) -> tuple:
        """Pickle only the settings, so that loaded data is not sent to other processes."""
        return type(self), (self.settings,)

    def train_at(self, place: ExecutorOptions) -> None:
        """Set the executor options for runs in separate processes.

        Raises:
            UserError: the options select an executor, but the runs are interleaved in this process.
        """
        if self.settings.in_turn and place != ExecutorOptions():
            raise UserError(
                "--executor, --workers and --slurm apply only to runs in separate processes, but these runs are "
                "interleaved in one process; add --alone, or omit these options"
            )
        self.place = place

    def train(self, jobs: Sequence[Job], description: str, training_class: Optional[type[Training]] = None) -> None:
        """Run the jobs that have no result yet, interleaved or in separate processes depending on the settings.

        Args:
            jobs: the jobs that train models on this task.
            description: the label of the progress bar.
            training_class: the training loop's class; :class:`ComparedTraining` by default.
        """
        if not jobs:
            return
        executor = None
        threads = torch.get_num_threads()
        if not self.settings.in_turn:
            gpus: list[str] = []
            if self.settings.device == "cuda":
                gpus = visible_gpus()
            threads = threads_per_run(self.place.workers or len(gpus))
            folder = jobs[0].folder.parent / "jobs"
            executor = choose_executor(self.place, folder, "lazyformer-training", threads, gpus, PRELOAD)
        jobs = [replace(job, report_to=self.report_to) for job in jobs]
        train(jobs, partial(training_class or ComparedTraining, self), description, executor, threads)

    def objective(self, spec: ModelSpec, seed: int, updates: int) -> Objective:
        """Return a model's objective for a run of `updates` updates."""
        return self.objective_of(self.network(spec), self.training_text(spec), seed, updates)

    @abstractmethod
    def network(self, spec: ModelSpec) -> Network:
        """Return the network builder for the model described by `spec`."""

    @abstractmethod
    def training_text(self, spec: ModelSpec) -> dict[str, Any]:
        """Return a model's options for reading the training text, by name."""

    @abstractmethod
    def objective_of(self, network: Network, text: Mapping[str, Any], seed: int, updates: int) -> Objective:
        """Return the objective for a network, training-text options and a run of `updates` updates."""

    @abstractmethod
    def sizes(self, spec: ModelSpec, vocab_size: int = 0) -> Sizes:
        """Return a model's sizes for the parameter and FLOP formulas.

        Differences between two models do not depend on `vocab_size`.
        """

    @abstractmethod
    def flops_of_update(self, spec: ModelSpec, vocab_size: int, length: int) -> int:
        """Return the FLOPs of an update on inputs of `length` tokens; a backward pass counts as two forward passes."""

    def lengths(self, spec: ModelSpec) -> tuple[tuple[int, float], ...]:  # noqa: ARG002
        """Return the successive input lengths, each with the fraction of the run at which it ends."""
        return ((0, 1.0),)

    def phases(self, spec: ModelSpec, updates: int, begin: int = 0) -> list[tuple[int, range]]:
        """Return a run's input lengths, each with the range of updates that use it, starting at `begin`."""
        phases = []
        for length, end in self.lengths(spec):
            last = max(begin, math.ceil(end * updates))
            phases.append((length, range(begin, last)))
            begin = last
        return phases

    def mean_flops(self, spec: ModelSpec, vocab_size: int) -> int:
        """Return the FLOPs per update, averaged over a run."""
        mean = 0.0
        begin = 0.0
        for length, end in self.lengths(spec):
            mean += self.flops_of_update(spec, vocab_size, length) * (end - begin)
            begin = end
        return round(mean)

    @abstractmethod
    def measure(self, training: TrainingLoop) -> dict[str, float]:
        """Compute the metrics for one point of the curve, including `loss`.

        All models, seeds and points are evaluated on the same text.
        """

    def final(self, training: Training) -> dict[str, float]:
        """Return a run's final metrics, by default the metrics at the last point of its curve."""
        return {name: training.curve[name][-1] for name in ("loss", "accuracy")}

    @abstractmethod
    def describe_data(self) -> dict[str, Any]:
        """Return facts about the data for the results: the yardsticks and the size of the validation text."""

    def unit(self) -> dict[str, str]:
        """Return the metric's `unit` if it depends on the data, otherwise an empty dictionary."""
        return {}

    def costs_of_use(self, jobs: Mapping[str, CompareJob]) -> dict[str, dict[str, Any]]:  # noqa: ARG002
        """Return the measured inference costs of the jobs' trained models, by name; empty by default."""
        return {}

    def optimization(self, spec: ModelSpec, seed: int, rate: float, updates: int) -> OptimizationConfig:
        """Return a model's optimization for `updates` updates, based on the recipe and the user's further options."""
        settings = self.settings
        recipe = settings.recipe_of(spec)
        schedule, schedule_options = recipe.schedule(rate, updates)
        own = self.given(RecipeOverrides, spec)
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
        """Return a dataclass's options with the recipe's values, overridden by the user's further options."""
        return {**select_options(options_class, of_recipe), **self.given(options_class, spec)}

    def given(self, options_class: type, spec: Optional[ModelSpec] = None) -> dict[str, Any]:
        """Return the user's further options, by name, that are fields of a dataclass.

        These are the options for all models and, if `spec` is given, the options for its model.

        Raises:
            UserError: an option does not belong to the models, text, optimizer or schedule.
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
        return select_options(
            options_class, parse_arguments(words, *self.OPTIONS, RecipeOverrides, optimizer_options, schedule_options)
        )

    @cached_property
    def words_per_token(self) -> float:
        """The approximate number of words per token in the training text, excluding tokens that begin blocks."""
        return read_word_counts(self.settings.data).per_token

    @property
    def words_per_update(self) -> float:
        """The approximate number of words per update."""
        sizes = self.settings.sizes
        longest = sizes.get("tokens_per_sample") or sizes["tgt_len"]
        return sizes["batch_size"] * longest * self.words_per_token

    def refuse_too_many_words(self, name: str, updates: int) -> None:
        """Raise a UserError if a run would read more words than the word budget allows.

        Args:
            name: the run's name for the message.
            updates: the run's length.
        """
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
        """Return the SHA-256 checksum of each file that the models read, by a location-independent name."""
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
    """A compared model's training loop; each point of the curve also has the tokens and FLOPs spent so far."""

    may_diverge = True

    def __init__(self, compared: ComparedTask, job: CompareJob):
        super().__init__(job)
        self.compared = compared
        count = POINTS
        if job.is_try:
            count = POINTS_OF_TRY
        self.points = frozenset(points(job.updates, count))
        self.word_counter = WordCounter(sum(self.tokens))
        marks = compared.settings.checkpoint_words
        if marks and not job.is_try:
            self.word_counter = WordCounter(sum(self.tokens), marks, compared.words_per_token)
        symbols = len(self.objective.dictionary)
        phases = compared.phases(job.spec, job.updates)
        self.flops: list[tuple[int, range]] = []
        for length, updates in phases:
            flops = compared.flops_of_update(job.spec, symbols, length)
            self.flops.append((flops, updates))

    def measure(self) -> Mapping[str, float]:
        """Return the task's metrics, and the tokens and FLOPs spent so far."""
        found = self.compared.measure(self)
        spent = 0
        for flops, updates in self.flops:
            spent += flops * len(range(updates.start, min(updates.stop, self.updates)))
        return {**found, "tokens": sum(self.tokens), "flops": spent}

    def update(self) -> int:
        """Train on one batch, and save the model if it has just reached one of the requested word counts."""
        tokens = super().update()
        for name in self.word_counter.add(tokens):
            self.save(with_optimizer=False, name=f"{name}.pt")
        return tokens

    def is_due(self) -> bool:
        """Return whether to validate and save after this update."""
        return self.updates in self.points

    def result(self) -> dict[str, Any]:
        """Return the learning rate, the curve, the final metrics, and the seconds per update."""
        final = self.compared.final(self)
        return {"rate": self.job.rate, "curve": self.curve, "final": final, "seconds": self.seconds}


def points(total: int, count: int) -> list[int]:
    """Return the `count` updates, out of `total`, at which a run is validated.

    They are denser at the start, and the last one is the end of the run.
    """
    found = set()
    for number in range(1, count + 1):
        share = (number / count) ** POINTS_EXPONENT
        found.add(max(1, round(total * share)))
    return sorted(found)
