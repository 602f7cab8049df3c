"""The results of a grid of fine-tuning runs: read from its folder, checked, and one number per score.

OUT/runs/grid.json                            models, tasks, learning rates and seeds that were asked for
OUT/runs/MODEL/TASK/lr2e-05_seed1/result.json   a run that ended well; failed.json where it failed

Scores follow LazyFormer's protocol (appendix A).
"""

import itertools
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional, Protocol

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.json_files import read_json, refuse_other_version

CONFIDENCE = 0.95
FORMAT_VERSION = 1
GRID_FILE = "grid.json"
RESULT, FAILED, SETTINGS = "result.json", "failed.json", "settings.json"  # of a run
LOG, BEST, LAST = "train.log", "checkpoint_best.pt", "checkpoint_last.pt"
ATTEMPT = "=== fairseq-train "  # each attempt begins with such a line in the log


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
    """The runs that were asked for: every combination of these. `models`: name -> checkpoint."""

    models: Mapping[str, str]
    tasks: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]

    def keys_of(self, model: str, task: str) -> list[RunKey]:
        return [RunKey(model, task, rate, seed) for rate in self.rates for seed in self.seeds]


@dataclass(frozen=True)
class Run:
    """A run that ended well, as its result.json has it; what has a default may be missing there.

    Attributes:
        updates: of its checkpoint's pre-training, where known.
        metrics: split as its file is called ("dev", "dev_matched") -> metric -> value, a fraction.
        baseline: as `metrics`, for an answer that needs no model.
        baselines: the same of all such answers, by name, where there are several.
        rows_in_file: that it could have been trained on; None in results older than this field.
        seconds: it took.
        head, head_dropout: of the classification head; None for a dense one, and for the checkpoint's own dropout.
        batch_size, warmup_ratio: None for LazyFormer's.
        started_from: task whose fine-tuned checkpoint it started from, where it was not the pre-trained one.
    """

    folder: Path
    model: str
    checkpoint: str
    task: str
    lr: float
    seed: int
    epochs: float
    metrics: dict
    baseline: dict
    train_rows: int
    seconds: float
    updates: Optional[int] = None
    rows_in_file: Optional[int] = None
    started_from: Optional[str] = None
    head: Optional[str] = None
    head_dropout: Optional[float] = None
    baselines: Optional[dict] = None
    batch_size: Optional[int] = None
    warmup_ratio: Optional[float] = None

    @property
    def key(self) -> RunKey:
        return RunKey(self.model, self.task, float(self.lr), self.seed)


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
                    values, baseline = found.values(split, metric), self.baseline(task, split, metric)
                    yield Measurement(model, task, split, metric, found, values, baseline)

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
        rates, metric = dict.fromkeys(run.key.rate for run in self.runs), self.task.selecting_metric
        return max(rates, key=lambda rate: np.median(self.values("valid", metric, rate)), default=None)

    @property
    def best(self) -> list[Run]:
        """The runs whose checkpoints are the best on the development set, over all rates and seeds: one, or equals."""
        file, metric = split_file(self.task, "valid"), self.task.selecting_metric
        highest = max((run.metrics[file][metric] for run in self.runs), default=None)
        return [run for run in self.runs if run.metrics[file][metric] == highest]

    def values(self, split: str, metric: str, rate: Optional[float] = None) -> np.ndarray:
        """One number per seed at a rate, by default the chosen one, in percent."""
        file, rate = split_file(self.task, split), self.rate if rate is None else rate
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
    def selects(self) -> bool:
        """Whether it is the metric that the paper's table has."""
        return self.metric == self.found.task.selecting_metric


def mean_bounds(values: np.ndarray) -> Optional[tuple[float, float]]:
    """Student's two-sided 95% interval for the mean over seeds; None for fewer than two seeds."""
    if len(values) < 2:
        return None
    from scipy import stats  # takes a second

    middle, error = float(np.mean(values)), float(stats.sem(values))
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
    runs, failures = {}, {}
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
            failures[key] = f"{place}: {_checked(path, read_json(path), {'message': str})['message']}"
    _check_same_development_sets(runs, benchmark)
    return Results(benchmark, grid, runs, failures)


def read_grid(path: Path, benchmark: TaskFamily) -> Grid:
    """Raises a UserError where the file is missing, no JSON, or lacks a field."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the folder that `lazyformer finetune` wrote")
    content = read_json(path)
    content = {"format_version": FORMAT_VERSION, **content}
    _checked(path, content, {"models": dict, "tasks": list, "lrs": list, "seeds": list}, is_versioned=True)
    for name, kind in (("tasks", str), ("lrs", float), ("seeds", int)):
        for value in content[name]:
            _check_kind(path, name, value, kind)
    tasks = tuple(_check_task(path, name, benchmark) for name in content["tasks"])
    return Grid(content["models"], tasks, tuple(map(float, content["lrs"])), tuple(content["seeds"]))


_HINTS = {field.name: typing.get_type_hints(Run)[field.name] for field in fields(Run) if field.name != "folder"}


def read_run(path: Path, benchmark: TaskFamily) -> Run:
    """Raises a UserError where a result.json is of another format version, lacks a field or metric, names no task."""
    content = _checked(path, read_json(path), _HINTS, is_versioned=True)
    task = benchmark.tasks[_check_task(path, content["task"], benchmark)]
    for field in ("metrics", "baseline"):
        for split, metric in measured(task):
            _check_kind(path, f"{field}.{split}", content[field].get(split), dict)
            _check_kind(path, f"{field}.{split}.{metric}", content[field][split].get(metric), float)
    return Run(path.parent, **{name: content[name] for name in _HINTS})


def _checked(
    path: Path, content: dict[str, Any], hints: Mapping[str, Any], is_versioned: bool = False
) -> dict[str, Any]:
    """The content of a file, each field of the kind in `hints`; an optional one that is missing is None."""
    if is_versioned:
        refuse_other_version(path, content, FORMAT_VERSION)
    for name, hint in hints.items():
        if name not in content and not typing.get_args(hint):
            raise UserError(f"{path}: has no field {name!r}; remove it and run the grid again")
        _check_kind(path, name, content.setdefault(name, None), hint)
    return content


def _check_kind(path: Path, name: str, value: Any, hint: Any) -> None:
    kinds = typing.get_args(hint) or (hint,)
    kinds = (int, *kinds) if float in kinds else kinds
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(f"{path}: field {name!r} is {value!r}, must be {wanted}; remove it and run the grid again")


def _check_task(path: Path, name: str, benchmark: TaskFamily) -> str:
    if name not in benchmark.tasks:
        raise UserError(f"{path}: {name!r} is no {benchmark.name} task; known are {', '.join(benchmark.tasks)}")
    return name


def _check_same_development_sets(runs: Mapping[RunKey, Run], benchmark: TaskFamily) -> None:
    """By the marks of answers that need no model, which depend on the set alone."""
    first: dict[str, Run] = {}
    for run in runs.values():
        other = first.setdefault(run.task, run)
        theirs = other.baselines or {"": other.baseline}
        for name, marks in (run.baselines or {"": run.baseline}).items():
            for split, metric in measured(benchmark.tasks[run.task]) if name in theirs else ():
                here, there = marks[split][metric], theirs[name][split][metric]
                if not math.isclose(here, there, abs_tol=1e-9):
                    raise UserError(
                        f"{run.folder}: its {run.task} {split} set is another than that of {other.folder}: the "
                        f"baseline's {metric} is {here}, not {there}. Scores on different rows do not compare: run "
                        "both on the same prepared data"
                    )
