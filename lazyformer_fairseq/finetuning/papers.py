"""Fine-tuning on GLUE in two papers: the settings that grids default to, and the numbers that stand beside ours."""

from collections.abc import Mapping
from typing import NamedTuple, Optional

from lazyformer_fairseq.data.glue import TASKS


class TuningProtocol(NamedTuple):
    """Settings of fine-tuning where the user says nothing.

    Attributes:
        epochs: of every task.
        batch_size: rows of an update.
        warmup: share of the updates in which the rate rises.
    """

    tasks: tuple[str, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    epochs: int
    batch_size: int
    warmup: float


class Score(NamedTuple):
    """A number of a report's first table, and a panel of its pictures: a metric on a development split of a task.

    Attributes:
        name: as the paper prints it.
        task: name in the table of tasks.
        split: fairseq's name of the development split, a key of the task's `splits`.
        column: its name in CSV files.
    """

    name: str
    task: str
    split: str
    metric: str
    column: str


SCORES: Mapping[str, Score] = {  # by name, each of the metric that selects its task's checkpoints
    name: Score(name, task, split, TASKS[task].selecting_metric, name)
    for name, task, split in (
        ("MNLI-m", "MNLI", "valid"),
        ("MNLI-mm", "MNLI", "valid1"),
        ("QNLI", "QNLI", "valid"),
        ("QQP", "QQP", "valid"),
        ("SST", "SST-2", "valid"),
        ("CoLA", "CoLA", "valid"),
        ("MRPC", "MRPC", "valid"),
        ("RTE", "RTE", "valid"),
        ("STS", "STS-B", "valid"),
    )
}
PAPER_TASKS = tuple(dict.fromkeys(score.task for score in SCORES.values()))

# Columns as LazyFormer's Table 1 prints them: the two numbers of MNLI share one.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "MNLI-m/mm": ("MNLI-m", "MNLI-mm"),
    **{name: (name,) for name, score in SCORES.items() if score.task != "MNLI"},
}

LEARNING_RATES = (2e-5, 3e-5, 4e-5, 5e-5)
SEEDS = (1, 2, 3, 4, 5)  # the papers give their number
LAZYFORMER, PAR = "lazyformer", "par"
PROTOCOLS: Mapping[str, TuningProtocol] = {
    # LazyFormer (arXiv 2102.12702), appendix A and Table 5.
    LAZYFORMER: TuningProtocol(PAPER_TASKS, LEARNING_RATES, SEEDS, 10, 32, 0.06),
    # PAR Transformer, Table 4: two tasks, medians of five runs. The rest are the defaults of the code to which its
    # footnote points (NVIDIA/DeepLearningExamples at 729963dd, BERT's scripts/run_glue.sh): eight GPUs with 16 rows.
    PAR: TuningProtocol(("SST-2", "MRPC"), (2.4e-5,), SEEDS, 3, 128, 0.1),
}


class PaperRow(NamedTuple):
    """A model of a paper: updates of pre-training, and its numbers in percent."""

    model: str
    updates: Optional[int]
    scores: Mapping[str, float]


PAPER_ROWS = tuple(  # LazyFormer's Table 1
    PaperRow(model, updates, dict(zip(SCORES, map(float, numbers.split()), strict=True)))
    for model, updates, numbers in (
        ("BERT", 1_000_000, "85.72 85.67 92.07 91.21 92.78 58.80 88.73 67.51 89.23"),
        ("M2x6-S", 1_000_000, "85.69 85.46 91.14 91.13 92.66 57.86 87.25 72.20 89.79"),
        ("M2x6-SD", 1_000_000, "85.34 85.50 91.65 91.22 93.23 57.85 86.76 70.40 89.69"),
        ("M2x6", 1_000_000, "86.34 86.31 91.82 91.38 93.00 60.77 87.75 73.65 90.00"),
        ("M2x6 mid", 500_000, "85.81 85.58 91.62 91.31 92.66 58.81 87.75 71.48 88.90"),
    )
)
PAR_ROWS = (  # PAR's Table 4 (arXiv 2009.04534); DistilBERT's are of its own paper
    PaperRow("DistilBERT", None, {"SST": 91.3, "MRPC": 87.5}),
    PaperRow("BERT Base", None, {"SST": 91.5, "MRPC": 88.7}),
    PaperRow("PAR BERT Base", None, {"SST": 91.6, "MRPC": 89.2}),
)
