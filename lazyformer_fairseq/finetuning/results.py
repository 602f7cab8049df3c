"""The results of a grid of fine-tuning runs: read from its folder, checked, and one number per score.

OUT/runs/grid.json                            models, tasks, learning rates and seeds that were asked for
OUT/runs/MODEL/TASK/lr2e-05_seed1/result.json   a run that ended well; failed.json where it failed

Scores follow LazyFormer's protocol (appendix A).
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional, Protocol

import numpy as np

from lazyformer_fairseq.data.prepared_folder import SplitFacts
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.checked import Amount, Count, PositiveAmount, PositiveCount, as_kind
from lazyformer_fairseq.storage.json_files import read_as, read_json, refuse_other_version

CONFIDENCE = 0.95
FORMAT_VERSION = 1
GRID_FILE = "grid.json"
RESULT = "result.json"  # of a run
FAILED = "failed.json"
LOG = "train.log"
BEST = "checkpoint_best.pt"
LAST = "checkpoint_last.pt"
MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]*")  # folders are called so
REMEDY = "remove it and run the grid again"

Marks = dict[str, dict[str, float]]  # split as its file is called ("dev", "dev_matched") -> metric -> value, a fraction


class ScoredTask(Protocol):
    """A task whose runs are compared.

    Attributes:
        splits: fairseq's name of a split (`train`, `valid`, `valid1`, `test`) -> its `file`, and official `rows`.
        metrics: names; fractions in results.
        selecting_metric: of `metrics`, the one that chooses checkpoint and rate.
    """

    name: str
    splits: Mapping[str, Any]
    metrics: tuple[str, ...]
    selecting_metric: str


class TaskFamily(Protocol):
    """What reading results needs of a benchmark: its name in messages, and its tasks by name."""

    name: str
    tasks: Mapping[str, ScoredTask]


def split_file(task: ScoredTask, split: str) -> str:
    """The name of a split in results: its file's, without the ending."""
    return Path(task.splits[split].file).stem


def development_splits(task: ScoredTask) -> list[str]:
    return [split for split in task.splits if split.startswith("valid")]


def measured(task: ScoredTask) -> list[tuple[str, str]]:
    """Every (split as its file is called, metric) that a result has."""
    return [(split_file(task, split), metric) for split in development_splits(task) for metric in task.metrics]


class RunKey(NamedTuple):
    """Identifies a run of a grid."""

    model: str
    task: str
    rate: float
    seed: int

    @property
    def folder(self) -> Path:
        """In that of all runs."""
        return Path(self.model, self.task, f"lr{self.rate:g}_seed{self.seed}")


@dataclass(frozen=True)
class Grid:
    """The runs that were asked for, as grid.json has them: every combination of models, tasks, rates and seeds.

    Attributes:
        models: name -> checkpoint.
        epochs: of each task.
        description: of a user's own task.
    """

    models: dict[str, str]
    tasks: tuple[str, ...]
    lrs: tuple[PositiveAmount, ...]
    seeds: tuple[Count, ...]
    epochs: dict[str, PositiveCount] = field(default_factory=dict)
    description: Optional[dict[str, Any]] = None

    def keys_of(self, model: str, task: str) -> list[RunKey]:
        return [RunKey(model, task, rate, seed) for rate in self.lrs for seed in self.seeds]


@dataclass(frozen=True)
class Run:
    """A run that ended well, as its result.json has it; what has a default may be missing there.

    Attributes:
        updates: of its checkpoint's pre-training, where known.
        metrics: of the model.
        baseline: for an answer that needs no model.
        baselines: the same of all such answers, by name, where there are several.
        rows_in_file: that it could have been trained on.
        seconds: it took.
        head, head_dropout: of the classification head; None for a dense one, and for the checkpoint's own dropout.
        batch_size, warmup_ratio: None for LazyFormer's.
        best_epoch, selected_by: of the epoch that was kept, and the metric that chose it.
        settings: all that decides the result.
        description: of a user's own task.
        splits: facts on the data it was trained and marked on, see :class:`SplitFacts`.
    """

    folder: Path
    model: str
    checkpoint: str
    task: str
    lr: PositiveAmount
    seed: Count
    epochs: PositiveAmount
    metrics: Marks
    baseline: Marks
    train_rows: Count
    seconds: Amount
    updates: Optional[Count] = None
    rows_in_file: Optional[Count] = None
    head: Optional[str] = None
    head_dropout: Optional[Amount] = None
    baselines: Optional[dict[str, Marks]] = None
    batch_size: Optional[PositiveCount] = None
    warmup_ratio: Optional[Amount] = None
    best_epoch: int = 0
    selected_by: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    description: Optional[dict[str, Any]] = None
    splits: tuple[SplitFacts, ...] = ()

    def only_label(self, split: str) -> Optional[str]:
        """Return the label of all rows of a development split, as its file is called; None where there are several."""
        labels = (facts.only_label for facts in self.splits if Path(facts.file).stem == split and not facts.is_train)
        return next(labels, None)

    @property
    def key(self) -> RunKey:
        return RunKey(self.model, self.task, self.lr, self.seed)


@dataclass(frozen=True)
class Failure:
    """A run that ended badly, as its failed.json has it."""

    message: str


@dataclass(frozen=True)
class Results:
    """A folder's results: the grid, runs that ended well, and why others failed."""

    benchmark: TaskFamily
    grid: Grid
    runs: Mapping[RunKey, Run]
    failures: Mapping[RunKey, str]

    def of(self, model: str, task: str) -> "TaskResults":
        keys = self.grid.keys_of(model, task)
        failed = [key for key in keys if key in self.failures]
        missing = [key for key in keys if key not in self.runs and key not in self.failures]
        runs = [self.runs[key] for key in keys if key in self.runs]
        return TaskResults(self.benchmark.tasks[task], keys, runs, failed, missing)

    def measurements(self) -> Iterator["Measurement"]:
        """Every metric of every development set of each model's tasks that have a run, in the order of the grid."""
        for model, task in itertools.product(self.grid.models, self.grid.tasks):
            found = self.of(model, task)
            for split, metric in itertools.product(development_splits(found.task), found.task.metrics):
                if found.runs:
                    values = found.values(split, metric)
                    baseline = self.baseline(task, split, metric)
                    yield Measurement(model, task, split, metric, found, values, baseline)

    def warnings(self) -> list[str]:
        """Return sentences on the data of all runs that the reader of their scores must know, one of each."""
        return list(
            dict.fromkeys(
                f"{run.task}: {sentence}"
                for run in self.runs.values()
                for facts in run.splits
                for sentence in facts.warnings(run.model)
            )
        )

    def baseline(self, task: str, split: str, metric: str) -> Optional[float]:
        """The baseline of a task's development set, in percent; None where no run of the task has ended well."""
        file = split_file(self.benchmark.tasks[task], split)
        return next((100 * run.baseline[file][metric] for run in self.runs.values() if run.task == task), None)


@dataclass(frozen=True)
class TaskResults:
    """The runs of one model on one task, and the paper's protocol on them (appendix A): median over seeds at each
    learning rate, then the best of these medians. MNLI's rate is chosen on its matched set, for both sets.
    """

    task: ScoredTask
    asked: list[RunKey]
    runs: list[Run]
    failed: list[RunKey]
    missing: list[RunKey]

    @property
    def updates(self) -> Optional[int]:
        """Of the model's pre-training."""
        return next((run.updates for run in self.runs), None)

    @property
    def is_complete(self) -> bool:
        return len(self.runs) == len(self.asked)

    @cached_property
    def rate(self) -> Optional[float]:
        """The chosen learning rate; the first of equally good ones; None where no run has ended well."""
        rates = dict.fromkeys(run.key.rate for run in self.runs)
        metric = self.task.selecting_metric
        return max(rates, key=lambda rate: np.median(self.values("valid", metric, rate)), default=None)

    @property
    def best(self) -> list[Run]:
        """The runs whose checkpoints are the best on the development set, over all rates and seeds: one, or equals."""
        file = split_file(self.task, "valid")
        metric = self.task.selecting_metric
        highest = max((run.metrics[file][metric] for run in self.runs), default=None)
        return [run for run in self.runs if run.metrics[file][metric] == highest]

    def only_label(self, split: str) -> Optional[str]:
        """Return the label of all rows of a development split; None where there are several, or nobody knows."""
        if self.runs:
            return self.runs[0].only_label(split_file(self.task, split))
        return None

    def values(self, split: str, metric: str, rate: Optional[float] = None) -> np.ndarray:
        """One number per seed at a rate, by default the chosen one, in percent."""
        file = split_file(self.task, split)
        rate = self.rate if rate is None else rate
        return np.array([100 * run.metrics[file][metric] for run in self.runs if run.key.rate == rate])


@dataclass(frozen=True)
class Measurement:
    """A metric of a model on a development set, at the rate that the task's own metric chose.

    Attributes:
        values: one a seed, in percent.
        baseline: of the set, in percent.
    """

    model: str
    task: str
    split: str
    metric: str
    found: TaskResults
    values: np.ndarray
    baseline: float

    @property
    def only_label(self) -> Optional[str]:
        """The label of all rows of the set, which then tells nothing; None where there are several."""
        return self.found.only_label(self.split)

    @property
    def selects(self) -> bool:
        """Whether it is the metric that the paper's table has."""
        return self.metric == self.found.task.selecting_metric


def mean_bounds(values: np.ndarray) -> Optional[tuple[float, float]]:
    """Student's two-sided 95% interval for the mean over seeds; None for fewer than two seeds."""
    if len(values) < 2:
        return None
    from scipy import stats  # takes a second

    middle = float(np.mean(values))
    error = float(stats.sem(values))
    if error == 0:
        return middle, middle  # scipy answers nan
    low, high = stats.t.interval(CONFIDENCE, len(values) - 1, loc=middle, scale=error)
    return float(low), float(high)


def read_results(folder: Path, benchmark: TaskFamily) -> Results:
    """Reads and checks the runs of the grid in ``folder``/runs.

    Args:
        benchmark: whose tasks the grid may have.

    Raises:
        UserError: no grid; a file that is no JSON, of another format version, or lacks a field; two runs of a task
            whose development sets differ.
    """
    grid = read_grid(folder / "runs" / GRID_FILE, benchmark)
    runs = {}
    failures = {}
    for key in (key for model in grid.models for task in grid.tasks for key in grid.keys_of(model, task)):
        place = folder / "runs" / key.folder
        if (place / RESULT).exists():
            run = read_run(place / RESULT, benchmark)
            if run.key != key:
                raise UserError(f"{place / RESULT}: is the result of {run.key.folder}; move it there, or remove it")
            for split, metric in measured(benchmark.tasks[key.task]):
                if not math.isfinite(run.metrics[split][metric]):
                    failures.setdefault(key, f"{place}: {metric} of {split} is not a number")
            if key not in failures:
                runs[key] = run
        elif (path := place / FAILED).exists():
            failures[key] = f"{place}: {read_as(Failure, path, REMEDY).message}"
    _check_same_development_sets(runs, benchmark)
    return Results(benchmark, grid, runs, failures)


def read_grid(path: Path, benchmark: Optional[TaskFamily] = None) -> Grid:
    """Reads grid.json.

    Args:
        benchmark: whose tasks alone it may have.

    Raises:
        UserError: the file is missing, no JSON, of another format version, or a field of it is wrong.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the folder that `lazyformer finetune` wrote")
    content = read_json(path)
    refuse_other_version(path, {"format_version": FORMAT_VERSION, **content}, FORMAT_VERSION)
    grid = as_kind(Grid, content, path, REMEDY)
    for name in grid.models:
        if not MODEL_NAME.fullmatch(name):
            raise UserError(f"{path}: {name!r} cannot name a model's folder; {REMEDY}")
    if benchmark is not None:
        for name in grid.tasks:
            _check_task(path, name, benchmark)
    return grid


def read_run(path: Path, benchmark: Optional[TaskFamily] = None) -> Run:
    """Reads result.json.

    Args:
        benchmark: whose tasks alone it may be of, with all their metrics.

    Raises:
        UserError: the file is no JSON, of another format version, or a field or metric of it is wrong.
    """
    content = read_json(path)
    refuse_other_version(path, content, FORMAT_VERSION)
    run = as_kind(Run, {**content, "folder": str(path.parent)}, path, REMEDY)
    if benchmark is not None:
        _check_task(path, run.task, benchmark)
        marks_by_field = {"metrics": run.metrics, "baseline": run.baseline}
        marks_by_field |= {f"baselines.{name}": marks for name, marks in (run.baselines or {}).items()}
        for name, marks in marks_by_field.items():
            for split, metric in measured(benchmark.tasks[run.task]):
                if metric not in marks.get(split, {}):
                    raise UserError(f"{path}: has no field '{name}.{split}.{metric}'; {REMEDY}")
    return run


def _check_task(path: Path, name: str, benchmark: TaskFamily) -> None:
    if name not in benchmark.tasks:
        raise UserError(f"{path}: {name!r} is no {benchmark.name} task; known are {', '.join(benchmark.tasks)}")


def _check_same_development_sets(runs: Mapping[RunKey, Run], benchmark: TaskFamily) -> None:
    """By the marks of answers that need no model, which depend on the set alone."""
    first: dict[str, Run] = {}
    for run in runs.values():
        other = first.setdefault(run.task, run)
        theirs = other.baselines or {"": other.baseline}
        for name, marks in (run.baselines or {"": run.baseline}).items():
            for split, metric in measured(benchmark.tasks[run.task]) if name in theirs else ():
                here = marks[split][metric]
                there = theirs[name][split][metric]
                if not math.isclose(here, there, abs_tol=1e-9):
                    raise UserError(
                        f"{run.folder}: its {run.task} {split} set is another than that of {other.folder}: the "
                        f"baseline's {metric} is {here}, not {there}. Scores on different rows do not compare: run "
                        "both on the same prepared data"
                    )
