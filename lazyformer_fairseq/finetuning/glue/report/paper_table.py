"""LazyFormer (arXiv 2102.12702): the grid of its Table 5; the columns, rows and average of its Table 1."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Optional

from lazyformer_fairseq.data.glue.task_table import TASKS

LEARNING_RATES = (2e-5, 3e-5, 4e-5, 5e-5)
SEEDS = (1, 2, 3, 4, 5)  # the paper gives their number


@dataclass(frozen=True)
class Score:
    """One of the table's numbers: the metric that selects a task's checkpoints, on a split of the task.

    Attributes:
        name: as the paper prints it; MNLI has two numbers.
        task: name in the table of tasks.
        split: fairseq's name of the development split, a key of the task's `splits`.
    """

    name: str
    task: str
    split: str = "valid"

    @property
    def metric(self) -> str:
        return TASKS[self.task].selecting_metric


_SCORES = (
    Score("MNLI-m", "MNLI"),
    Score("MNLI-mm", "MNLI", "valid1"),
    Score("QNLI", "QNLI"),
    Score("QQP", "QQP"),
    Score("SST", "SST-2"),
    Score("CoLA", "CoLA"),
    Score("MRPC", "MRPC"),
    Score("RTE", "RTE"),
    Score("STS", "STS-B"),
)
SCORES: Mapping[str, Score] = {score.name: score for score in _SCORES}
PAPER_TASKS = tuple(dict.fromkeys(score.task for score in _SCORES))

# Columns as printed: the two numbers of MNLI share one.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "MNLI-m/mm": ("MNLI-m", "MNLI-mm"),
    **{name: (name,) for name, score in SCORES.items() if score.task != "MNLI"},
}


@dataclass(frozen=True)
class PaperRow:
    """A model of the paper: updates of pre-training, its nine numbers in percent, and the average that is printed."""

    model: str
    updates: int
    scores: Mapping[str, float]
    printed_average: float


def _row(model: str, updates: int, numbers: str, printed_average: float) -> PaperRow:
    return PaperRow(model, updates, dict(zip(SCORES, map(float, numbers.split()), strict=True)), printed_average)


PAPER_ROWS = (
    _row("BERT", 1_000_000, "85.72 85.67 92.07 91.21 92.78 58.80 88.73 67.51 89.23", 83.52),
    _row("M2x6-S", 1_000_000, "85.69 85.46 91.14 91.13 92.66 57.86 87.25 72.20 89.79", 83.69),
    _row("M2x6-SD", 1_000_000, "85.34 85.50 91.65 91.22 93.23 57.85 86.76 70.40 89.69", 83.52),
    _row("M2x6", 1_000_000, "86.34 86.31 91.82 91.38 93.00 60.77 87.75 73.65 90.00", 84.56),
    _row("M2x6 mid", 500_000, "85.81 85.58 91.62 91.31 92.66 58.81 87.75 71.48 88.90", 83.77),
)


def average(scores: Mapping[str, float]) -> Optional[float]:
    """The mean of the paper's nine numbers, MNLI-m and -mm counted apart; None where one of the nine is missing."""
    if not SCORES.keys() <= scores.keys():
        return None
    return fmean(scores[name] for name in SCORES)
