"""The files that gluebenchmark.com takes: a line per test row, its number and the predicted label or score."""

import csv
import zipfile
from pathlib import Path

import numpy as np

from lazyformer_fairseq.data.glue.task_table import TASKS, TaskDescription
from lazyformer_fairseq.errors import UserError

HEADER = ("index", "prediction")


def leaderboard_splits(task: TaskDescription) -> list[str]:
    return [split for split in task.splits if split.startswith("test")]


def submission_file(task: TaskDescription, split: str) -> str:
    """The leaderboard's name for a test set: that of its task; MNLI has a matched and a mismatched one."""
    if len(leaderboard_splits(task)) == 1:
        return f"{task.name}.tsv"
    return f"{task.name}-{'m' if split == 'test' else 'mm'}.tsv"


SUBMISSION_FILES = tuple(submission_file(task, split) for task in TASKS.values() for split in leaderboard_splits(task))


def prediction_words(task: TaskDescription, predictions: np.ndarray) -> list[str]:
    """Label words for classes (N,), or scores with three decimals, none outside the task's range.

    Raises:
        UserError: a score is not a number.
    """
    if not task.is_regression:
        return [task.labels[number] for number in predictions]
    if not np.isfinite(predictions).all():
        raise UserError(f"{task.name}: the model predicts {predictions[~np.isfinite(predictions)][0]}; train it anew")
    return [f"{score:.3f}" for score in np.clip(predictions, *task.score_range)]


def write_submission(path: Path, words: list[str]) -> None:
    """One file: `words` in the order of the test rows, numbered from 0."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(enumerate(words))


def zip_submission(folder: Path) -> Path:
    """``submission.zip`` in `folder`, with its files at the top, as the leaderboard wants them."""
    path = folder / "submission.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in SUBMISSION_FILES:
            if (folder / name).is_file():
                archive.write(folder / name, name)
    return path
