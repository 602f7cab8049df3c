"""The results of a grid of fine-tuning runs: read from its folder, checked, and one number per score.

OUT/runs/grid.json                            models, tasks, learning rates and seeds that were asked for
OUT/runs/MODEL/TASK/lr2e-05_seed1/result.json   a run that ended well; failed.json where it failed

Scores follow LazyFormer's protocol (appendix A).
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional, Protocol

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.json_files import read_json

CONFIDENCE = 0.95
GRID_FILE = "grid.json"
RESULT, FAILED, SETTINGS = "result.json", "failed.json", "settings.json"  # of a run
LOG, BEST, LAST = "train.log", "checkpoint_best.pt", "checkpoint_last.pt"
ATTEMPT = "=== fairseq-train "  # each attempt begins with such a line in the log


class SplitFile(Protocol):
    """A split's file, by its name in the task's folder."""

    file: str


class ScoredTask(Protocol):
    """A task whose runs are compared.

    Attributes:
        splits: fairseq's name of a split (`train`, `valid`, `valid1`, `test`) -> file.
        metrics: names; fractions in results.
        selecting_metric: of `metrics`, the one that chooses checkpoint and rate.
    """

    name: str
    splits: Mapping[str, SplitFile]
    metrics: tuple[str, ...]
    selecting_metric: str


class TaskFamily(Protocol):
    """The tasks that a grid may have: their name in messages, each by name, and the command that runs them."""

    name: str
    tasks: Mapping[str, ScoredTask]
    command: str


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
    """A run that ended well.

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

    key: RunKey
    folder: Path
    checkpoint: str
    updates: Optional[int]
    epochs: float
    metrics: Mapping[str, Mapping[str, float]]
    baseline: Mapping[str, Mapping[str, float]]
    train_rows: int
    rows_in_file: Optional[int]
    seconds: float
    started_from: Optional[str]
    head: Optional[str]
    head_dropout: Optional[float]
    baselines: Optional[Mapping[str, Mapping[str, Mapping[str, float]]]] = None
    batch_size: Optional[int] = None
    warmup_ratio: Optional[float] = None


@dataclass(frozen=True)
class Failure:
    """A run that has no result, and why."""

    folder: Path
    message: str


@dataclass(frozen=True)
class Results:
    """A folder's results: the grid, runs that ended well, those that failed, the number of runs outside the grid."""

    folder: Path
    family: TaskFamily
    grid: Grid
    runs: Mapping[RunKey, Run]
    failures: Mapping[RunKey, Failure]
    outside_grid: int

    def of(self, model: str, task: str) -> "TaskResults":
        keys = self.grid.keys_of(model, task)
        return TaskResults(
            self.family.tasks[task],
            asked=keys,
            runs=[self.runs[key] for key in keys if key in self.runs],
            failed=[key for key in keys if key in self.failures],
            missing=[key for key in keys if key not in self.runs and key not in self.failures],
        )

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
        file = split_file(self.family.tasks[task], split)
        runs = (run for key, run in self.runs.items() if key.task == task)
        return next((100 * run.baseline[file][metric] for run in runs), None)


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
        return max(rates, key=self._median_at, default=None)

    def _median_at(self, rate: float) -> float:
        return float(np.median(self._values("valid", self.task.selecting_metric, rate)))

    @property
    def best(self) -> list[Run]:
        """The runs whose checkpoints are the best on the development set, over all rates and seeds: one, or equals."""
        file, metric = split_file(self.task, "valid"), self.task.selecting_metric
        highest = max((run.metrics[file][metric] for run in self.runs), default=None)
        return [run for run in self.runs if run.metrics[file][metric] == highest]

    def values(self, split: str, metric: str) -> np.ndarray:
        """One number per seed at the chosen rate, in percent."""
        return self._values(split, metric, self.rate)

    def _values(self, split: str, metric: str, rate: Optional[float]) -> np.ndarray:
        file = split_file(self.task, split)
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


FORMAT_VERSION = 1
_NUMBER = (int, float)
_OPTIONAL = type(None)
_RESULT_FIELDS = {
    "model": (str,),
    "checkpoint": (str,),
    "updates": (int, _OPTIONAL),
    "task": (str,),
    "lr": _NUMBER,
    "seed": (int,),
    "epochs": _NUMBER,
    "metrics": (dict,),
    "baseline": (dict,),
    "train_rows": (int,),
    "rows_in_file": (int, _OPTIONAL),
    "seconds": _NUMBER,
    "started_from": (str, _OPTIONAL),
    "head": (str, _OPTIONAL),
    "head_dropout": (*_NUMBER, _OPTIONAL),
    "baselines": (dict, _OPTIONAL),
    "batch_size": (int, _OPTIONAL),
    "warmup_ratio": (*_NUMBER, _OPTIONAL),
}
_KEY_FIELDS = ("model", "task", "lr", "seed")
_GRID_FIELDS = {"models": (dict,), "tasks": (list,), "lrs": (list,), "seeds": (list,)}
_FAILED_FIELDS = {"message": (str,)}
_RUN_FOLDER = re.compile(r"lr(?P<rate>.+)_seed(?P<seed>\d+)")


def read_results(folder: Path, family: TaskFamily) -> Results:
    """Reads and checks ``folder``/runs.

    Args:
        family: the tasks that the grid may have.

    Raises:
        UserError: no grid; a file that is no JSON, of another format version, or lacks a field; a run that is there
            twice; two runs of a task whose development sets differ.
    """
    runs_folder = folder / "runs"
    grid = read_grid(runs_folder / GRID_FILE, family)
    runs: dict[RunKey, Run] = {}
    failures: dict[RunKey, Failure] = {}
    for path in sorted(runs_folder.glob("*/*/*/failed.json")):
        key = _key_of_folder(path.parent)
        if key is not None and not (path.parent / "result.json").exists():
            failures[key] = Failure(path.parent, _read_json(path, _FAILED_FIELDS)["message"])
    for path in sorted(runs_folder.glob("*/*/*/result.json")):
        run = read_run(path, family)
        if run.key in runs:
            raise UserError(f"{path}: is the same run as {runs[run.key].folder}; remove one of them")
        runs[run.key] = run
    for key in [key for key, run in runs.items() if _not_a_number(run, family)]:
        run = runs.pop(key)
        failures[key] = Failure(run.folder, f"{_not_a_number(run, family)} is not a number")
    asked = {key for model in grid.models for task in grid.tasks for key in grid.keys_of(model, task)}
    outside_grid = len((runs.keys() | failures.keys()) - asked)
    runs = {key: run for key, run in runs.items() if key in asked}
    failures = {key: failure for key, failure in failures.items() if key in asked}
    _check_same_development_sets(runs, family)
    return Results(folder, family, grid, runs, failures, outside_grid)


def read_grid(path: Path, family: TaskFamily) -> Grid:
    """Raises a UserError where the file is missing, no JSON, or lacks a field."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the folder that `{family.command}` wrote")
    content = _read_json(path, _GRID_FIELDS)
    _check_version(path, content.get("format_version", FORMAT_VERSION))
    for name, kinds in (("tasks", (str,)), ("lrs", _NUMBER), ("seeds", (int,))):
        for value in content[name]:
            _check_kind(path, name, value, kinds)
    return Grid(
        content["models"],
        tuple(_check_task(path, name, family) for name in content["tasks"]),
        tuple(float(rate) for rate in content["lrs"]),
        tuple(content["seeds"]),
    )


def read_run(path: Path, family: TaskFamily) -> Run:
    """Raises a UserError where a result.json is of another format version, lacks a field or metric, names no task."""
    _check_version(path, _read_json(path, {}).get("format_version"))
    content = _read_json(path, _RESULT_FIELDS)
    task = family.tasks[_check_task(path, content["task"], family)]
    for field in ("metrics", "baseline"):
        for split, metric in measured(task):
            _check_kind(path, f"{field}.{split}", content[field].get(split), (dict,))
            _check_kind(path, f"{field}.{split}.{metric}", content[field][split].get(metric), _NUMBER)
    key = RunKey(content["model"], task.name, float(content["lr"]), content["seed"])
    return Run(key, path.parent, **{name: content[name] for name in _RESULT_FIELDS if name not in _KEY_FIELDS})


def _check_version(path: Path, version: Any) -> None:
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {version!r}, but this program reads {FORMAT_VERSION}")


def _read_json(path: Path, fields: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """A JSON object that holds `fields`, each of one of its kinds."""
    content = read_json(path)
    for name, kinds in fields.items():
        if name not in content and _OPTIONAL not in kinds:
            raise UserError(f"{path}: has no field {name!r}; remove it and run the grid again")
        _check_kind(path, name, content.setdefault(name, None), kinds)
    return content


def _check_kind(path: Path, name: str, value: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(f"{path}: field {name!r} is {value!r}, must be {wanted}; remove it and run the grid again")


def _check_task(path: Path, name: str, family: TaskFamily) -> str:
    if name not in family.tasks:
        raise UserError(f"{path}: {name!r} is no {family.name} task; known are {', '.join(family.tasks)}")
    return name


def _key_of_folder(folder: Path) -> Optional[RunKey]:
    """The run that a folder is named after; None for any other name."""
    found = _RUN_FOLDER.fullmatch(folder.name)
    try:
        return found and RunKey(folder.parents[1].name, folder.parent.name, float(found["rate"]), int(found["seed"]))
    except ValueError:
        return None


def _not_a_number(run: Run, family: TaskFamily) -> Optional[str]:
    """The first metric of a run that is infinite or not a number, by split and name."""
    for split, metric in measured(family.tasks[run.key.task]):
        if not math.isfinite(run.metrics[split][metric]):
            return f"{metric} of {split}"
    return None


def _check_same_development_sets(runs: Mapping[RunKey, Run], family: TaskFamily) -> None:
    first: dict[str, Run] = {}
    for run in runs.values():
        other = first.setdefault(run.key.task, run)
        for split, metric in measured(family.tasks[run.key.task]):
            ours, theirs = run.baseline[split][metric], other.baseline[split][metric]
            if not math.isclose(ours, theirs, abs_tol=1e-9):
                raise UserError(
                    f"{run.folder}: its {run.key.task} {split} set is another than that of {other.folder}: the "
                    f"baseline's {metric} is {ours}, not {theirs}. Scores on different rows do not compare: run both "
                    "on the same prepared data"
                )


def listed(values: Iterable[Any]) -> str:
    """Numbers in a sentence."""
    return ", ".join(f"{value:g}" for value in values)


def either(values: Iterable[str]) -> str:
    """Different ones, in a sentence."""
    return " or ".join(sorted(set(values)))
