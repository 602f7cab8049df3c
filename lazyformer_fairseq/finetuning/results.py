"""Reads and checks the results of a grid of fine-tuning runs.

OUT/runs/grid.json                              requested models, tasks, learning rates and seeds
OUT/runs/MODEL/TASK/lr2e-05_seed1/result.json   the result of a successful run
OUT/runs/MODEL/TASK/lr2e-05_seed1/failed.json   the error message of a failed run
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional, Protocol

import numpy as np

from lazyformer_fairseq.data.prepared_folder import SplitFacts
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.checked import Amount, Count, PositiveAmount, PositiveCount, as_type
from lazyformer_fairseq.storage.json_files import read_as, read_json, refuse_other_version

FORMAT_VERSION = 1
GRID_FILE = "grid.json"
RESULT = "result.json"  # the result of one run
FAILED = "failed.json"
LOG = "train.log"
BEST = "checkpoint_best.pt"
LAST = "checkpoint_last.pt"
MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]*")  # names that can be used for folders
REMEDY = "remove it and run the grid again"

# Metric values as fractions, by file name without extension (such as "dev" or "dev_matched") and metric name.
MetricValues = dict[str, dict[str, float]]


class ScoredTask(Protocol):
    """The interface of a task on which runs are scored.

    Attributes:
        name: the name of the task.
        splits: the splits by fairseq's name (`train`, `valid`, `valid1`, `test`), each with its `file` and official
            number of `rows`.
        metrics: the names of the metrics; results store their values as fractions.
        selecting_metric: the metric, one of `metrics`, that selects the checkpoint and learning rate.
    """

    name: str
    splits: Mapping[str, Any]
    metrics: tuple[str, ...]
    selecting_metric: str


class TaskFamily(Protocol):
    """The part of the benchmark interface needed to read results.

    Attributes:
        name: the name in messages.
        tasks: the tasks by name.
    """

    name: str
    tasks: Mapping[str, ScoredTask]


def split_file(task: ScoredTask, split: str) -> str:
    """Return a split's name in results: its file name without the extension."""
    return Path(task.splits[split].file).stem


def development_splits(task: ScoredTask) -> list[str]:
    """Return the names of the development splits, on which runs are compared."""
    return [split for split in task.splits if split.startswith("valid")]


class RunKey(NamedTuple):
    """The key that identifies a run in a grid."""

    model: str
    task: str
    rate: float
    seed: int

    @property
    def folder(self) -> Path:
        """The run's folder, relative to the ``runs`` folder."""
        return Path(self.model, self.task, f"lr{self.rate:g}_seed{self.seed}")


@dataclass(frozen=True)
class Grid:
    """The requested runs, as stored in grid.json: all combinations of models, tasks, learning rates and seeds.

    Attributes:
        models: checkpoints by model name.
        tasks: task names.
        lrs: learning rates.
        seeds: random seeds.
        epochs: number of epochs by task name.
        description: the description of the custom task, if any.
    """

    models: dict[str, str]
    tasks: tuple[str, ...]
    lrs: tuple[PositiveAmount, ...]
    seeds: tuple[Count, ...]
    epochs: dict[str, PositiveCount] = field(default_factory=dict)
    description: Optional[dict[str, Any]] = None

    def keys_of(self, model: str, task: str) -> list[RunKey]:
        """Return the keys of a model's runs on a task, ordered by learning rate."""
        return [RunKey(model, task, rate, seed) for rate in self.lrs for seed in self.seeds]


@dataclass(frozen=True)
class Run:
    """A successful run, as stored in its result.json.

    Attributes:
        folder: the run's folder.
        model: the name of the model.
        checkpoint: the pre-trained checkpoint that was fine-tuned.
        task: the name of the task.
        lr: the learning rate.
        seed: the random seed.
        epochs: the number of epochs.
        metrics: the model's scores at its best epoch.
        baseline: scores of the model-free baseline.
        train_rows: number of training rows per epoch.
        seconds: duration of the run in seconds.
        updates: the checkpoint's number of pre-training updates, if known.
        best_epoch: the epoch whose checkpoint was kept.
        settings: all settings that determine the result.
        splits: facts about the data used for training and scoring.
    """

    folder: Path
    model: str
    checkpoint: str
    task: str
    lr: PositiveAmount
    seed: Count
    epochs: PositiveAmount
    metrics: MetricValues
    baseline: MetricValues
    train_rows: Count
    seconds: Amount
    updates: Optional[Count] = None
    best_epoch: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    splits: tuple[SplitFacts, ...] = ()

    def only_label(self, split: str) -> Optional[str]:
        """Return the label if all rows of a development split (named by file stem) have the same label, else None."""
        for facts in self.splits:
            if Path(facts.file).stem == split and not facts.is_train:
                return facts.only_label
        return None

    @property
    def key(self) -> RunKey:
        """The key that identifies the run."""
        return RunKey(self.model, self.task, self.lr, self.seed)


@dataclass(frozen=True)
class Failure:
    """A failed run, as stored in its failed.json."""

    message: str


@dataclass(frozen=True)
class Results:
    """The results of a grid.

    Attributes:
        benchmark: the grid's benchmark.
        grid: the requested runs.
        runs: the successful runs.
        failures: error messages of the failed runs.
    """

    benchmark: TaskFamily
    grid: Grid
    runs: Mapping[RunKey, Run]
    failures: Mapping[RunKey, str]

    def of(self, model: str, task: str) -> "TaskResults":
        """Return the runs of one model on one task."""
        keys = self.grid.keys_of(model, task)
        return TaskResults(
            task=self.benchmark.tasks[task],
            runs=[self.runs[key] for key in keys if key in self.runs],
            failed=[key for key in keys if key in self.failures],
            missing=[key for key in keys if key not in self.runs and key not in self.failures],
        )

    def measurements(self) -> Iterator["Measurement"]:
        """Yield each metric on each development split, for all models and tasks with results, in grid order."""
        for model, task in itertools.product(self.grid.models, self.grid.tasks):
            found = self.of(model, task)
            if not found.runs:
                continue
            for split, metric in itertools.product(development_splits(found.task), found.task.metrics):
                yield Measurement(
                    model=model,
                    split=split,
                    metric=metric,
                    found=found,
                    values=found.values(split, metric),
                    baseline=self.baseline(task, split, metric),
                )

    def warnings(self) -> list[str]:
        """Return warnings, without duplicates, about data issues that affect how to interpret the scores."""
        return warnings_on((run.model, run.task, facts) for run in self.runs.values() for facts in run.splits)

    def baseline(self, task: str, split: str, metric: str) -> Optional[float]:
        """Return the baseline's score on a development split, in percent; None if no run of the task has succeeded."""
        for run in self.runs.values():
            if run.task == task:
                file = split_file(self.benchmark.tasks[task], split)
                return 100 * run.baseline[file][metric]
        return None


def warnings_on(facts: Iterable[tuple[str, str, SplitFacts]]) -> list[str]:
    """Return warnings, without duplicates, about data issues that affect how to interpret the scores.

    Args:
        facts: tuples of model name, task name and facts about one of the task's splits.
    """
    sentences: dict[str, None] = {}
    for model, task, on_split in facts:
        sentences |= dict.fromkeys(f"{task}: {sentence}" for sentence in on_split.warnings(model))
    return list(sentences)


@dataclass(frozen=True)
class TaskResults:
    """The runs of one model on one task, scored by LazyFormer's protocol (appendix A).

    A score is the median over seeds at the best learning rate. For MNLI, the learning rate is selected on the matched
    set and used for both sets.

    Attributes:
        task: the task.
        runs: the successful runs.
        failed: the failed runs.
        missing: the unfinished runs.
    """

    task: ScoredTask
    runs: list[Run]
    failed: list[RunKey]
    missing: list[RunKey]

    @property
    def is_complete(self) -> bool:
        """True if all requested runs have succeeded."""
        return not self.failed and not self.missing

    @cached_property
    def rate(self) -> Optional[float]:
        """The selected learning rate (the first one among ties); None if no run has succeeded."""

        def median_score(rate: float) -> float:
            values = self._values_at(rate, "valid", self.task.selecting_metric)
            return float(np.median(values))

        rates = dict.fromkeys(run.lr for run in self.runs)
        return max(rates, key=median_score, default=None)

    @property
    def best(self) -> list[Run]:
        """All runs tied for the best development score, over all learning rates and seeds."""

        def score_of(run: Run) -> float:
            metrics = run.metrics[split_file(self.task, "valid")]
            return metrics[self.task.selecting_metric]

        scores = [score_of(run) for run in self.runs]
        highest = max((score for score in scores if not math.isnan(score)), default=None)
        return [run for run, score in zip(self.runs, scores, strict=True) if score == highest]

    def only_label(self, split: str) -> Optional[str]:
        """Return the label if all rows of a development split have the same label; None if not, or if unknown."""
        if self.runs:
            return self.runs[0].only_label(split_file(self.task, split))
        return None

    def values(self, split: str, metric: str) -> np.ndarray:
        """Return one value per seed at the selected learning rate, in percent."""
        return self._values_at(self.rate, split, metric)

    def _values_at(self, rate: Optional[float], split: str, metric: str) -> np.ndarray:
        file = split_file(self.task, split)
        runs = [run for run in self.runs if run.lr == rate]
        return np.array([100 * run.metrics[file][metric] for run in runs])


@dataclass(frozen=True)
class Measurement:
    """A model's values of a metric on a development split, at the selected learning rate.

    Attributes:
        model: the name of the model.
        split: fairseq's name for the development split.
        metric: the name of the metric.
        found: all of the model's runs on the task.
        values: one value per seed, in percent.
        baseline: the baseline's score, in percent.
    """

    model: str
    split: str
    metric: str
    found: TaskResults
    values: np.ndarray
    baseline: float

    @property
    def task(self) -> str:
        """The name of the task."""
        return self.found.task.name

    @property
    def selects(self) -> bool:
        """True if this metric selects the epoch and the learning rate."""
        return self.metric == self.found.task.selecting_metric


def read_results(folder: Path, benchmark: TaskFamily) -> Results:
    """Read and check the results of a grid.

    Args:
        folder: the output folder of ``lazyformer finetune``.
        benchmark: the benchmark that the grid's tasks must belong to.

    Raises:
        UserError: there is no grid; a file is not JSON, has an unsupported format version or lacks a field; or two runs
            on the same task have different development sets.
    """
    grid = read_grid(folder / "runs" / GRID_FILE, benchmark)
    runs = {}
    failures = {}
    for model, task in itertools.product(grid.models, grid.tasks):
        for key in grid.keys_of(model, task):
            place = folder / "runs" / key.folder
            if (place / RESULT).exists():
                run = read_run(place / RESULT, benchmark)
                if run.key != key:
                    raise UserError(
                        f"{place / RESULT} is the result of {run.key.folder}; move the file there or remove it"
                    )
                undefined = [
                    f"{metric} of {file}"
                    for file, metric, value in _iterate_metrics(run.metrics)
                    if not math.isfinite(value)
                ]
                if undefined:
                    failures[key] = f"{place}: {undefined[0]} is not a number"
                else:
                    runs[key] = run
            elif (place / FAILED).exists():
                failures[key] = f"{place}: {read_as(Failure, place / FAILED, REMEDY).message}"
    _refuse_other_development_sets(runs.values())
    return Results(benchmark, grid, runs, failures)


def read_grid(path: Path, benchmark: Optional[TaskFamily] = None) -> Grid:
    """Read and check grid.json.

    Args:
        path: the file.
        benchmark: the benchmark that the tasks must belong to; None to allow any.

    Raises:
        UserError: the file is missing, is not JSON, has an unsupported format version, or contains an invalid field.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; pass the output folder of `lazyformer finetune`")
    content = read_json(path)
    refuse_other_version(path, {"format_version": FORMAT_VERSION, **content}, FORMAT_VERSION)
    grid = as_type(Grid, content, path, REMEDY)
    for name in grid.models:
        if not MODEL_NAME.fullmatch(name):
            raise UserError(f"{path}: {name!r} cannot be used as a folder name; {REMEDY}")
    for name in grid.tasks:
        _check_task(path, name, benchmark)
    return grid


def read_run(path: Path, benchmark: Optional[TaskFamily] = None) -> Run:
    """Read and check result.json.

    Args:
        path: the file.
        benchmark: the benchmark that the task must belong to; all of the task's metrics are then required. None to
            allow any task.

    Raises:
        UserError: the file is not JSON or has an unsupported format version, or a field or metric is missing or
            invalid.
    """
    content = read_json(path)
    refuse_other_version(path, content, FORMAT_VERSION)
    run = as_type(Run, {**content, "folder": str(path.parent)}, path, REMEDY)
    if benchmark is None:
        return run
    _check_task(path, run.task, benchmark)
    task = benchmark.tasks[run.task]
    for split, metric in itertools.product(development_splits(task), task.metrics):
        file = split_file(task, split)
        for name, marks in {"metrics": run.metrics, "baseline": run.baseline}.items():
            if metric not in marks.get(file, {}):
                raise UserError(f"{path}: field '{name}.{file}.{metric}' is missing; {REMEDY}")
    return run


def kept_checkpoint(run: Path) -> Path:
    """Return a run's best checkpoint.

    Raises:
        UserError: the checkpoint was not kept.
    """
    checkpoint = run / BEST
    if not checkpoint.is_file():
        raise UserError(
            f"{checkpoint}: no such checkpoint; remove {run / RESULT} and run the grid again with --keep-checkpoints "
            "best"
        )
    return checkpoint


def _check_task(path: Path, name: str, benchmark: Optional[TaskFamily]) -> None:
    if benchmark is not None and name not in benchmark.tasks:
        raise UserError(
            f"{path}: {name!r} is not a {benchmark.name} task; known tasks are {', '.join(benchmark.tasks)}"
        )


def _iterate_metrics(marks: MetricValues) -> Iterator[tuple[str, str, float]]:
    """Yield all values with their file and metric names."""
    for file, values in marks.items():
        for metric, value in values.items():
            yield file, metric, value


def _refuse_other_development_sets(runs: Iterable[Run]) -> None:
    """Raise a UserError if runs on the same task used different development sets, as shown by different baselines."""
    first: dict[str, Run] = {}
    for run in runs:
        other = first.setdefault(run.task, run)
        for file, metric, value in _iterate_metrics(run.baseline):
            there = other.baseline.get(file, {}).get(metric, value)
            if not math.isclose(value, there, abs_tol=1e-9):
                raise UserError(
                    f"{run.folder} and {other.folder} used different {run.task} {file} sets: the baseline's {metric} "
                    f"is {value} on the first and {there} on the second. Scores on different rows cannot be compared; "
                    "run both on the same prepared data"
                )
