"""What the results of a task look like: its development files and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


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


@dataclass(frozen=True)
class TaskFamily:
    """The tasks that one command fine-tunes on.

    Attributes:
        name: for messages: GLUE, SQuAD.
        tasks: by name.
        command: that runs a grid of them.
    """

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
