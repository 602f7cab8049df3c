"""What a grid of fine-tuning runs left in its folder: read, checked, and brought to one number a task.

OUT/runs/grid.json                            models, tasks, learning rates and seeds that were asked for
OUT/runs/MODEL/TASK/lr2e-05_seed1/result.json   a run that ended well; failed.json where it failed
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from scipy import stats

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.glue.paper_table import PAPER_TASKS, SCORES
from lazyformer_fairseq.glue.task_table import TASKS, TaskDescription

FORMAT_VERSION = 1
CONFIDENCE = 0.95
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
    "seconds": _NUMBER,
    "started_from": (str, _OPTIONAL),
}
_KEY_FIELDS = ("model", "task", "lr", "seed")
_GRID_FIELDS = {"models": (dict,), "tasks": (list,), "lrs": (list,), "seeds": (list,)}
_FAILED_FIELDS = {"message": (str,)}
_RUN_FOLDER = re.compile(r"lr(?P<rate>.+)_seed(?P<seed>\d+)")


class RunKey(NamedTuple):
    """Which run of a grid."""

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
        updates: of pre-training of its checkpoint, where known.
        metrics: split as its file is called ("dev", "dev_matched") -> metric -> value, a fraction.
        baseline: as `metrics`, for the majority class or a constant score.
        seconds: it took.
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
    seconds: float
    started_from: Optional[str]


@dataclass(frozen=True)
class Failure:
    """A run that has no result, and why."""

    folder: Path
    message: str


@dataclass(frozen=True)
class Results:
    """All of a folder: the grid, what ended well, what failed, and how many runs lie there beside the grid."""

    folder: Path
    grid: Grid
    runs: Mapping[RunKey, Run]
    failures: Mapping[RunKey, Failure]
    outside_grid: int

    def of(self, model: str, task: str) -> "TaskResults":
        keys = self.grid.keys_of(model, task)
        return TaskResults(
            TASKS[task],
            asked=keys,
            runs=[self.runs[key] for key in keys if key in self.runs],
            failed=[key for key in keys if key in self.failures],
            missing=[key for key in keys if key not in self.runs and key not in self.failures],
        )

    def paper_scores(self, model: str) -> tuple[dict[str, float], frozenset[str]]:
        """The model's medians by their names in the paper's table, in percent, and the tasks whose grid lacks runs."""
        tasks = {task: self.of(model, task) for task in PAPER_TASKS if task in self.grid.tasks}
        scores = {
            score.name: float(np.median(tasks[score.task].values(score.split, score.metric)))
            for score in SCORES.values()
            if score.task in tasks and tasks[score.task].runs
        }
        return scores, frozenset(task for task, found in tasks.items() if not found.is_complete)

    def baseline(self, task: str, split: str, metric: str) -> Optional[float]:
        """Of a task's development set, in percent; None where no run of the task has ended well."""
        file = split_file(TASKS[task], split)
        runs = (run for key, run in self.runs.items() if key.task == task)
        return next((100 * run.baseline[file][metric] for run in runs), None)


@dataclass(frozen=True)
class TaskResults:
    """The runs of one model on one task, and the paper's protocol on them (appendix A): median over seeds at each
    learning rate, then the best of these medians. MNLI's rate is chosen on its matched set, for both sets.
    """

    task: TaskDescription
    asked: list[RunKey]
    runs: list[Run]
    failed: list[RunKey]
    missing: list[RunKey]

    @property
    def is_complete(self) -> bool:
        return len(self.runs) == len(self.asked)

    @cached_property
    def rate(self) -> Optional[float]:
        """The chosen learning rate; of equally good ones the first; None where no run has ended well."""
        rates = dict.fromkeys(run.key.rate for run in self.runs)
        return max(rates, key=self._median_at, default=None)

    def _median_at(self, rate: float) -> float:
        return float(np.median(self._values("valid", self.task.selecting_metric, rate)))

    @property
    def chosen(self) -> list[Run]:
        """The runs at the chosen rate, a seed each."""
        return [run for run in self.runs if run.key.rate == self.rate]

    @property
    def best(self) -> list[Run]:
        """The runs whose checkpoints are the best on the development set, over all rates and seeds: one, or equals."""
        file, metric = split_file(self.task, "valid"), self.task.selecting_metric
        highest = max((run.metrics[file][metric] for run in self.runs), default=None)
        return [run for run in self.runs if run.metrics[file][metric] == highest]

    def values(self, split: str, metric: str) -> np.ndarray:
        """One number a seed at the chosen rate, in percent."""
        return self._values(split, metric, self.rate)

    def _values(self, split: str, metric: str, rate: Optional[float]) -> np.ndarray:
        file = split_file(self.task, split)
        return np.array([100 * run.metrics[file][metric] for run in self.runs if run.key.rate == rate])


def split_file(task: TaskDescription, split: str) -> str:
    """The name that results have for a split: its file's, without the ending."""
    return Path(task.splits[split].file).stem


def development_splits(task: TaskDescription) -> list[str]:
    return [split for split in task.splits if split.startswith("valid")]


def _measured(task: TaskDescription) -> list[tuple[str, str]]:
    """Every (split as its file is called, metric) that a result has."""
    return [(split_file(task, split), metric) for split in development_splits(task) for metric in task.metrics]


def mean_bounds(values: np.ndarray) -> Optional[tuple[float, float]]:
    """Student's two-sided 95% interval for the mean over seeds; None for fewer than two seeds."""
    if len(values) < 2:
        return None
    middle, error = float(np.mean(values)), float(stats.sem(values))
    if error == 0:
        return middle, middle  # scipy answers nan
    low, high = stats.t.interval(CONFIDENCE, len(values) - 1, loc=middle, scale=error)
    return float(low), float(high)


def read_results(folder: Path) -> Results:
    """Reads and checks ``folder``/runs.

    Raises:
        UserError: no grid; a file that is no JSON, of another format version, or lacks a field; a run that is there
            twice; two runs of a task whose development sets differ.
    """
    runs_folder = folder / "runs"
    grid = read_grid(runs_folder / "grid.json")
    runs: dict[RunKey, Run] = {}
    failures: dict[RunKey, Failure] = {}
    for path in sorted(runs_folder.glob("*/*/*/failed.json")):
        key = _key_of_folder(path.parent)
        if key is not None and not (path.parent / "result.json").exists():
            failures[key] = Failure(path.parent, _read_json(path, _FAILED_FIELDS)["message"])
    for path in sorted(runs_folder.glob("*/*/*/result.json")):
        run = read_run(path)
        if run.key in runs:
            raise UserError(f"{path}: is the same run as {runs[run.key].folder}; remove one of them")
        runs[run.key] = run
    for key in [key for key, run in runs.items() if _not_a_number(run)]:
        run = runs.pop(key)
        failures[key] = Failure(run.folder, f"{_not_a_number(run)} is not a number")
    asked = {key for model in grid.models for task in grid.tasks for key in grid.keys_of(model, task)}
    outside_grid = len((runs.keys() | failures.keys()) - asked)
    runs = {key: run for key, run in runs.items() if key in asked}
    failures = {key: failure for key, failure in failures.items() if key in asked}
    _check_same_development_sets(runs)
    return Results(folder, grid, runs, failures, outside_grid)


def read_grid(path: Path) -> Grid:
    """Raises a UserError where the file is missing, no JSON, or lacks a field."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the folder that `lazyformer glue run` wrote")
    content = _read_json(path, _GRID_FIELDS)
    _check_version(path, content.get("format_version", FORMAT_VERSION))
    for name, kinds in (("tasks", (str,)), ("lrs", _NUMBER), ("seeds", (int,))):
        for value in content[name]:
            _check_kind(path, name, value, kinds)
    return Grid(
        content["models"],
        tuple(_check_task(path, name) for name in content["tasks"]),
        tuple(float(rate) for rate in content["lrs"]),
        tuple(content["seeds"]),
    )


def read_run(path: Path) -> Run:
    """Reads a result.json; see the module.

    Raises:
        UserError: it is no JSON, of another format version, lacks a field or a metric, or names no task.
    """
    _check_version(path, _read_json(path, {}).get("format_version"))
    content = _read_json(path, _RESULT_FIELDS)
    task = TASKS[_check_task(path, content["task"])]
    for field in ("metrics", "baseline"):
        for split, metric in _measured(task):
            _check_metric(path, content[field], field, split, metric)
    key = RunKey(content["model"], task.name, float(content["lr"]), content["seed"])
    return Run(key, path.parent, **{name: content[name] for name in _RESULT_FIELDS if name not in _KEY_FIELDS})


def _check_version(path: Path, version: Any) -> None:
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {version!r}, but this program reads {FORMAT_VERSION}")


def _read_json(path: Path, fields: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """A JSON object that holds `fields`, each of one of its kinds."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); remove it and run the grid again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {type(content).__name__}, not an object; remove it and run the grid again")
    for name, kinds in fields.items():
        if name not in content and _OPTIONAL not in kinds:
            raise UserError(f"{path}: has no field {name!r}; remove it and run the grid again")
        _check_kind(path, name, content.setdefault(name, None), kinds)
    return content


def _check_kind(path: Path, name: str, value: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(f"{path}: field {name!r} is {value!r}, must be {wanted}; remove it and run the grid again")


def _check_metric(path: Path, values: dict[str, Any], field: str, file: str, metric: str) -> None:
    _check_kind(path, f"{field}.{file}", values.get(file), (dict,))
    _check_kind(path, f"{field}.{file}.{metric}", values[file].get(metric), _NUMBER)


def _check_task(path: Path, name: str) -> str:
    if name not in TASKS:
        raise UserError(f"{path}: {name!r} is no GLUE task; known are {', '.join(TASKS)}")
    return name


def _key_of_folder(folder: Path) -> Optional[RunKey]:
    """The run that a folder is called after, None where it is called otherwise."""
    found = _RUN_FOLDER.fullmatch(folder.name)
    try:
        return found and RunKey(folder.parents[1].name, folder.parent.name, float(found["rate"]), int(found["seed"]))
    except ValueError:
        return None


def _not_a_number(run: Run) -> Optional[str]:
    """The first metric of a run that is infinite or not a number, by split and name."""
    for split, metric in _measured(TASKS[run.key.task]):
        if not math.isfinite(run.metrics[split][metric]):
            return f"{metric} of {split}"
    return None


def _check_same_development_sets(runs: Mapping[RunKey, Run]) -> None:
    first: dict[str, Run] = {}
    for run in runs.values():
        other = first.setdefault(run.key.task, run)
        for split, metric in _measured(TASKS[run.key.task]):
            ours, theirs = run.baseline[split][metric], other.baseline[split][metric]
            if not math.isclose(ours, theirs, abs_tol=1e-9):
                raise UserError(
                    f"{run.folder}: its {run.key.task} {split} set is another than that of {other.folder}: the "
                    f"baseline's {metric} is {ours}, not {theirs}. Scores on different rows do not compare: run both "
                    "on the same prepared data"
                )
