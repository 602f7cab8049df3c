"""The results of a grid of fine-tuning runs, read from its folder and checked.

OUT/runs/grid.json                            models, tasks, learning rates and seeds that were asked for
OUT/runs/MODEL/TASK/lr2e-05_seed1/result.json   a run that ended well; failed.json where it failed
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
        name: name of the task.
        splits: fairseq's name of a split (`train`, `valid`, `valid1`, `test`) -> its `file`, and official `rows`.
        metrics: names; fractions in results.
        selecting_metric: the one of `metrics` that chooses checkpoint and rate.
    """

    name: str
    splits: Mapping[str, Any]
    metrics: tuple[str, ...]
    selecting_metric: str


class TaskFamily(Protocol):
    """A benchmark as far as reading results needs it.

    Attributes:
        name: name in messages.
        tasks: the tasks by name.
    """

    name: str
    tasks: Mapping[str, ScoredTask]


def split_file(task: ScoredTask, split: str) -> str:
    """Return the name of a split in results: its file's, without the ending."""
    return Path(task.splits[split].file).stem


def development_splits(task: ScoredTask) -> list[str]:
    """Return the splits on which runs are compared."""
    return [split for split in task.splits if split.startswith("valid")]


class RunKey(NamedTuple):
    """The identity of a run in a grid."""

    model: str
    task: str
    rate: float
    seed: int

    @property
    def folder(self) -> Path:
        """The run's folder within that of all runs."""
        return Path(self.model, self.task, f"lr{self.rate:g}_seed{self.seed}")


@dataclass(frozen=True)
class Grid:
    """The runs that were asked for, as grid.json has them: every combination of models, tasks, rates and seeds.

    Attributes:
        models: name -> checkpoint.
        tasks: names of tasks.
        lrs: learning rates.
        seeds: random seeds.
        epochs: number of epochs of each task.
        description: the custom task, if there is one.
    """

    models: dict[str, str]
    tasks: tuple[str, ...]
    lrs: tuple[PositiveAmount, ...]
    seeds: tuple[Count, ...]
    epochs: dict[str, PositiveCount] = field(default_factory=dict)
    description: Optional[dict[str, Any]] = None

    def keys_of(self, model: str, task: str) -> list[RunKey]:
        """Return the runs of a model on a task, rate by rate."""
        return [RunKey(model, task, rate, seed) for rate in self.lrs for seed in self.seeds]


@dataclass(frozen=True)
class Run:
    """A run that ended well, as its result.json has it.

    Attributes:
        folder: the run's folder.
        model: the model's name.
        checkpoint: the checkpoint that the run started from.
        task: the task's name.
        lr: learning rate.
        seed: random seed.
        epochs: number of epochs.
        metrics: scores of the model at its best epoch.
        baseline: scores of an answer that needs no model.
        train_rows: rows per epoch.
        seconds: duration of the run.
        updates: updates of the checkpoint's pre-training, where known.
        best_epoch: the epoch that was kept.
        settings: everything that decides the result.
        splits: facts on the data that the run was trained and scored on.
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
    best_epoch: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    splits: tuple[SplitFacts, ...] = ()

    def only_label(self, split: str) -> Optional[str]:
        """Return the label of all rows of a development split, as its file is called; None where there are several."""
        for facts in self.splits:
            if Path(facts.file).stem == split and not facts.is_train:
                return facts.only_label
        return None

    @property
    def key(self) -> RunKey:
        """The run's identity."""
        return RunKey(self.model, self.task, self.lr, self.seed)


@dataclass(frozen=True)
class Failure:
    """A run that ended badly, as its failed.json has it."""

    message: str


@dataclass(frozen=True)
class Results:
    """The results of a folder.

    Attributes:
        benchmark: the benchmark of the grid.
        grid: the runs that were asked for.
        runs: the runs that ended well.
        failures: why others failed.
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
        """Yield every metric of every development set of each model's tasks that have a run, in the grid's order."""
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
        """Return sentences on the data of all runs that the reader of their scores must know, one of each."""
        return warnings_on((run.model, run.task, facts) for run in self.runs.values() for facts in run.splits)

    def baseline(self, task: str, split: str, metric: str) -> Optional[float]:
        """Return the baseline of a task's development set, in percent; None where no run of it has ended well."""
        for run in self.runs.values():
            if run.task == task:
                return 100 * run.baseline[split_file(self.benchmark.tasks[task], split)][metric]
        return None


def warnings_on(facts: Iterable[tuple[str, str, SplitFacts]]) -> list[str]:
    """Return sentences on data that the reader of scores must know, one of each.

    Args:
        facts: the names of a model and of a task, and facts on one of its splits.
    """
    sentences: dict[str, None] = {}
    for model, task, on_split in facts:
        sentences |= dict.fromkeys(f"{task}: {sentence}" for sentence in on_split.warnings(model))
    return list(sentences)


@dataclass(frozen=True)
class TaskResults:
    """The runs of one model on one task, scored by LazyFormer's protocol (appendix A).

    A score is the median over seeds at each learning rate, and of these medians the best. MNLI's rate is chosen on
    its matched set, for both sets.

    Attributes:
        task: the task.
        runs: runs that ended well.
        failed: runs that failed.
        missing: runs that have not ended.
    """

    task: ScoredTask
    runs: list[Run]
    failed: list[RunKey]
    missing: list[RunKey]

    @property
    def is_complete(self) -> bool:
        """True if all runs that were asked for have ended well."""
        return not self.failed and not self.missing

    @cached_property
    def rate(self) -> Optional[float]:
        """The chosen learning rate; the first of equally good ones; None where no run has ended well."""
        rates = dict.fromkeys(run.lr for run in self.runs)
        metric = self.task.selecting_metric
        return max(rates, key=lambda rate: np.median(self._values_at(rate, "valid", metric)), default=None)

    @property
    def best(self) -> list[Run]:
        """The runs whose checkpoints are best on the development set, over all rates and seeds: one, or equals."""
        scores = [run.metrics[split_file(self.task, "valid")][self.task.selecting_metric] for run in self.runs]
        highest = max((score for score in scores if not math.isnan(score)), default=None)
        return [run for run, score in zip(self.runs, scores, strict=True) if score == highest]

    def only_label(self, split: str) -> Optional[str]:
        """Return the label of all rows of a development split; None where there are several, or nobody knows."""
        if self.runs:
            return self.runs[0].only_label(split_file(self.task, split))
        return None

    def values(self, split: str, metric: str) -> np.ndarray:
        """Return one number per seed at the chosen rate, in percent."""
        return self._values_at(self.rate, split, metric)

    def _values_at(self, rate: Optional[float], split: str, metric: str) -> np.ndarray:
        file = split_file(self.task, split)
        return np.array([100 * run.metrics[file][metric] for run in self.runs if run.lr == rate])


@dataclass(frozen=True)
class Measurement:
    """A metric of a model on a development set, at the rate that the task's own metric chose.

    Attributes:
        model: the model's name.
        split: fairseq's name of the development split.
        metric: the metric's name.
        found: all runs of the model on the task.
        values: one number per seed, in percent.
        baseline: the score of an answer that needs no model, in percent.
    """

    model: str
    split: str
    metric: str
    found: TaskResults
    values: np.ndarray
    baseline: float

    @property
    def task(self) -> str:
        """The task's name."""
        return self.found.task.name

    @property
    def selects(self) -> bool:
        """True for the metric that chooses epoch and rate."""
        return self.metric == self.found.task.selecting_metric


def read_results(folder: Path, benchmark: TaskFamily) -> Results:
    """Read and check the runs of the grid in ``folder``/runs.

    Args:
        folder: the folder that ``lazyformer finetune`` wrote.
        benchmark: the benchmark whose tasks the grid may have.

    Raises:
        UserError: no grid; a file that is no JSON, of another format version, or lacks a field; two runs of a task
            whose development sets differ.
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
                    raise UserError(f"{place / RESULT}: is the result of {run.key.folder}; move it there, or remove it")
                undefined = [
                    f"{metric} of {file}" for file, metric, value in _marks(run.metrics) if not math.isfinite(value)
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
    """Read grid.json.

    Args:
        path: the file.
        benchmark: the benchmark whose tasks alone it may have; None for any.

    Raises:
        UserError: the file is missing, no JSON, of another format version, or a field of it is wrong.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the folder that `lazyformer finetune` wrote")
    content = read_json(path)
    refuse_other_version(path, {"format_version": FORMAT_VERSION, **content}, FORMAT_VERSION)
    grid = as_type(Grid, content, path, REMEDY)
    for name in grid.models:
        if not MODEL_NAME.fullmatch(name):
            raise UserError(f"{path}: {name!r} cannot name a model's folder; {REMEDY}")
    for name in grid.tasks:
        _check_task(path, name, benchmark)
    return grid


def read_run(path: Path, benchmark: Optional[TaskFamily] = None) -> Run:
    """Read result.json.

    Args:
        path: the file.
        benchmark: the benchmark whose tasks alone it may be of, with all their metrics; None for any.

    Raises:
        UserError: the file is no JSON, of another format version, or a field or metric of it is wrong.
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
                raise UserError(f"{path}: has no field '{name}.{file}.{metric}'; {REMEDY}")
    return run


def kept_checkpoint(run: Path) -> Path:
    """Return the checkpoint of a run's best epoch.

    Raises:
        UserError: it was not kept.
    """
    checkpoint = run / BEST
    if not checkpoint.is_file():
        raise UserError(
            f"{checkpoint}: no such checkpoint; remove {run / RESULT}, and run it again with --keep-checkpoints best"
        )
    return checkpoint


def _check_task(path: Path, name: str, benchmark: Optional[TaskFamily]) -> None:
    if benchmark is not None and name not in benchmark.tasks:
        raise UserError(f"{path}: {name!r} is no {benchmark.name} task; known are {', '.join(benchmark.tasks)}")


def _marks(marks: Marks) -> Iterator[tuple[str, str, float]]:
    """Yield each file, metric and value."""
    for file, values in marks.items():
        for metric, value in values.items():
            yield file, metric, value


def _refuse_other_development_sets(runs: Iterable[Run]) -> None:
    """Compare the baselines of a task's runs, which depend on its development sets alone."""
    first: dict[str, Run] = {}
    for run in runs:
        other = first.setdefault(run.task, run)
        for file, metric, value in _marks(run.baseline):
            there = other.baseline.get(file, {}).get(metric, value)
            if not math.isclose(value, there, abs_tol=1e-9):
                raise UserError(
                    f"{run.folder}: its {run.task} {file} set is another than that of {other.folder}: the baseline's "
                    f"{metric} is {value}, not {there}. Scores on different rows do not compare: run both on the same "
                    "prepared data"
                )
