"""The results of a grid of fine-tuning runs, by LazyFormer's protocol (appendix A): one number per score."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
from scipy import stats

from lazyformer_fairseq.finetuning.scored_task import ScoredTask, TaskFamily, development_splits, split_file

CONFIDENCE = 0.95


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
    middle, error = float(np.mean(values)), float(stats.sem(values))
    if error == 0:
        return middle, middle  # scipy answers nan
    low, high = stats.t.interval(CONFIDENCE, len(values) - 1, loc=middle, scale=error)
    return float(low), float(high)
