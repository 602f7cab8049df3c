"""The one table of GLUE's tasks: here and nowhere else stand a task's files, columns, labels and metrics.

Files and columns are those of the official download (gluebenchmark.com/tasks). The metric that selects a checkpoint and
the number of epochs are those of LazyFormer (arXiv 2102.12702, appendix A and Table 5).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Optional, Union

from lazyformer_fairseq.errors import UserError

Column = Union[int, str]


@dataclass(frozen=True)
class Split:
    """One file of a task.

    Attributes:
        file: its name in the task's folder.
        texts: the columns of one sentence or of a pair: names where the file has a header, else numbers from 0.
        label: the column of the label, as above; None where the file has no labels.
    """

    file: str
    texts: tuple[Column, ...]
    label: Optional[Column] = None

    @property
    def has_header(self) -> bool:
        return isinstance(self.texts[0], str)


@dataclass(frozen=True)
class TaskDescription:
    """One row of the table.

    Attributes:
        name: as the papers print it.
        folder: of the official download.
        splits: fairseq's name of a split (`train`, `valid`, `valid1`, `test`, `test1`) -> file.
        metrics: names in :data:`lazyformer_fairseq.data.glue.metrics.METRICS`; the first selects the checkpoint.
        labels: the words of the label column; a word's place is its class. Empty where scores are predicted.
        score_range: lowest and highest score where scores are predicted.
        epochs: of fine-tuning.
        skips_short_rows: the official file is known to hold rows with too few fields, which are counted and skipped.
        model_of: the task whose model and labels it is predicted with, where it has no training data of its own.
        rows: split -> examples of the official file; those with too few fields are not counted.
    """

    name: str
    folder: str
    splits: Mapping[str, Split]
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()
    score_range: Optional[tuple[float, float]] = None
    epochs: int = 10
    skips_short_rows: bool = False
    model_of: Optional[str] = None
    rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def selecting_metric(self) -> str:
        return self.metrics[0]

    @property
    def is_pair(self) -> bool:
        return any(len(split.texts) == 2 for split in self.splits.values())

    @property
    def is_regression(self) -> bool:
        return self.score_range is not None

    @property
    def num_classes(self) -> int:
        """Outputs of the classification head: 1 where scores are predicted."""
        return len(self.labels) or 1

    @property
    def head_name(self) -> str:
        """Name of the classification head in a model."""
        return (self.model_of or self.name).lower()

    def target(self, word: str) -> Union[int, float]:
        """The class (from 0) or the score for a label column's `word`.

        Raises:
            UserError: not a label of the task; the message lists those allowed, the caller adds file and line.
        """
        if not self.is_regression:
            if word not in self.labels:
                raise UserError(f"label {word!r} is none of {self.name}'s labels {', '.join(self.labels)}")
            return self.labels.index(word)
        lowest, highest = self.score_range
        try:
            score = float(word)
        except ValueError:
            score = float("nan")
        if not lowest <= score <= highest:
            raise UserError(f"score {word!r} is no number from {lowest:g} to {highest:g}, as {self.name}'s are")
        return score


def _splits(
    texts: tuple[str, ...],
    label: str,
    valid: tuple[str, ...] = ("dev.tsv",),
    test: tuple[str, ...] = ("test.tsv",),
) -> dict[str, Split]:
    """Splits of a task whose files all have a header and call their columns the same."""
    return {
        "train": Split("train.tsv", texts, label),
        **{f"valid{number or ''}": Split(file, texts, label) for number, file in enumerate(valid)},
        **{f"test{number or ''}": Split(file, texts) for number, file in enumerate(test)},
    }


_SENTENCES = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_INFERENCE = ("contradiction", "entailment", "neutral")

_TABLE = (
    TaskDescription(
        "CoLA",
        "CoLA",
        {
            "train": Split("train.tsv", (3,), 1),
            "valid": Split("dev.tsv", (3,), 1),
            "test": Split("test.tsv", ("sentence",)),
        },
        ("matthews", "accuracy"),
        labels=("0", "1"),
        rows={"train": 8551, "valid": 1043, "test": 1063},
    ),
    TaskDescription(
        "SST-2",
        "SST-2",
        _splits(("sentence",), "label"),
        ("accuracy",),
        labels=("0", "1"),
        rows={"train": 67349, "valid": 872, "test": 1821},
    ),
    TaskDescription(
        "MRPC",
        "MRPC",
        _splits(("#1 String", "#2 String"), "Quality"),
        ("accuracy", "f1"),
        labels=("0", "1"),
        rows={"train": 3668, "valid": 408, "test": 1725},
    ),
    TaskDescription(
        "STS-B",
        "STS-B",
        _splits(_SENTENCES, "score"),
        ("pearson", "spearman"),
        score_range=(0.0, 5.0),
        rows={"train": 5749, "valid": 1500, "test": 1379},
    ),
    TaskDescription(
        "QQP",
        "QQP",
        _splits(("question1", "question2"), "is_duplicate"),
        ("accuracy", "f1"),
        labels=("0", "1"),
        skips_short_rows=True,
        rows={"train": 363846, "valid": 40430, "test": 390965},
    ),
    TaskDescription(
        "MNLI",
        "MNLI",
        _splits(
            _SENTENCES,
            "gold_label",
            valid=("dev_matched.tsv", "dev_mismatched.tsv"),
            test=("test_matched.tsv", "test_mismatched.tsv"),
        ),
        ("accuracy",),
        labels=_INFERENCE,
        rows={"train": 392702, "valid": 9815, "valid1": 9832, "test": 9796, "test1": 9847},
    ),
    TaskDescription(
        "QNLI",
        "QNLI",
        _splits(("question", "sentence"), "label"),
        ("accuracy",),
        labels=_ENTAILMENT,
        rows={"train": 104743, "valid": 5463, "test": 5463},
    ),
    TaskDescription(
        "RTE",
        "RTE",
        _splits(_SENTENCES, "label"),
        ("accuracy",),
        labels=_ENTAILMENT,
        rows={"train": 2490, "valid": 277, "test": 3000},
    ),
    TaskDescription(
        "WNLI",
        "WNLI",
        _splits(_SENTENCES, "label"),
        ("accuracy",),
        labels=("0", "1"),
        rows={"train": 635, "valid": 71, "test": 146},
    ),
    TaskDescription(
        "AX",
        "diagnostic",
        {"test": Split("diagnostic.tsv", _SENTENCES)},
        ("matthews",),
        labels=_INFERENCE,
        model_of="MNLI",
        rows={"test": 1104},
    ),
)

TASKS: Mapping[str, TaskDescription] = {task.name: task for task in _TABLE}


def find_task(name: str) -> TaskDescription:
    """The row of a task by its name or folder, whatever the case.

    Raises:
        UserError: no such task; the message lists them.
    """
    for task in TASKS.values():
        if name.lower() in (task.name.lower(), task.folder.lower()):
            return task
    raise UserError(f"{name!r} is no GLUE task; known are {', '.join(TASKS)}")
