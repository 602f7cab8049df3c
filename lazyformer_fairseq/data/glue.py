"""GLUE: the one table of its tasks, and the reader of their official files.

Here and nowhere else stand a task's files, columns, labels and metrics. Files and columns are those of the official
download (gluebenchmark.com/tasks). The metric that selects a checkpoint and the number of epochs are those of
LazyFormer (arXiv 2102.12702, appendix A and Table 5).

In the files a quotation mark is a character like any other (QUOTE_NONE): texts hold unpaired ones. So a line divided at
its tabs is the row; only a line feed ends it, for texts hold other characters that Unicode calls line ends.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
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
        rows: examples of the official file; those with too few fields are not counted.
    """

    file: str
    texts: tuple[Column, ...]
    label: Optional[Column]
    rows: int

    @property
    def has_header(self) -> bool:
        return isinstance(self.texts[0], str)


@dataclass(frozen=True)
class TaskDescription:
    """One row of the table.

    Attributes:
        name: as the papers print it.
        splits: fairseq's name of a split (`train`, `valid`, `valid1`, `test`, `test1`) -> file.
        metrics: names in :data:`lazyformer_fairseq.finetuning.texts.METRICS`; the first selects the checkpoint.
        labels: the words of the label column; a word's place is its class. Empty where scores are predicted.
        score_range: lowest and highest score where scores are predicted.
        epochs: of fine-tuning.
        has_odd_rows: its official files are known to hold rows with too few fields, which are skipped, and two empty
            sentences, which are kept; both are counted.
        model_of: the task whose model and labels it is predicted with, where it has no training data of its own.
        own_folder: of the official download, where it is not called as the task.
    """

    name: str
    splits: Mapping[str, Split]
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()
    score_range: Optional[tuple[float, float]] = None
    epochs: int = 10
    has_odd_rows: bool = False
    model_of: Optional[str] = None
    own_folder: str = ""

    @property
    def folder(self) -> str:
        """Of the official download."""
        return self.own_folder or self.name

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
        with suppress(ValueError):
            if lowest <= (score := float(word)) <= highest:
                return score
        raise UserError(f"score {word!r} is no number from {lowest:g} to {highest:g}, as {self.name}'s are")


_FILES = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}


def _splits(
    texts: tuple[str, ...], label: str, rows: tuple[int, ...], files: Mapping[str, str] = _FILES
) -> dict[str, Split]:
    """Splits of a task whose files (split -> file, each of so many rows) have a header and equal names of columns."""
    return {
        split: Split(file, texts, None if split.startswith("test") else label, count)
        for (split, file), count in zip(files.items(), rows, strict=True)
    }


def made_splits(texts: tuple[str, ...]) -> dict[str, Split]:
    """Splits of a task that has no official files, and as many rows as its maker wants; all are labelled."""
    return {split: Split(split, texts, "label", 0) for split in ("train", "valid", "test")}


_BINARY = ("0", "1")
_ACCURACY, _AND_F1 = ("accuracy",), ("accuracy", "f1")
_SENTENCES = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_INFERENCE = ("contradiction", "entailment", "neutral")
_COLA = {
    "train": Split("train.tsv", (3,), 1, 8551),
    "valid": Split("dev.tsv", (3,), 1, 1043),
    "test": Split("test.tsv", ("sentence",), None, 1063),
}
_QQP = _splits(("question1", "question2"), "is_duplicate", (363846, 40430, 390965))
_MNLI_FILES = {
    **{"train": "train.tsv", "valid": "dev_matched.tsv", "valid1": "dev_mismatched.tsv"},
    **{"test": "test_matched.tsv", "test1": "test_mismatched.tsv"},
}
_MNLI = _splits(_SENTENCES, "gold_label", (392702, 9815, 9832, 9796, 9847), _MNLI_FILES)
_AX = {"test": Split("diagnostic.tsv", _SENTENCES, None, 1104)}
_TASKS = (
    TaskDescription("CoLA", _COLA, ("matthews", "accuracy"), _BINARY),
    TaskDescription("SST-2", _splits(("sentence",), "label", (67349, 872, 1821)), _ACCURACY, _BINARY),
    TaskDescription("MRPC", _splits(("#1 String", "#2 String"), "Quality", (3668, 408, 1725)), _AND_F1, _BINARY),
    TaskDescription("STS-B", _splits(_SENTENCES, "score", (5749, 1500, 1379)), ("pearson", "spearman"), (), (0.0, 5.0)),
    TaskDescription("QQP", _QQP, _AND_F1, _BINARY, has_odd_rows=True),
    TaskDescription("MNLI", _MNLI, _ACCURACY, _INFERENCE),
    TaskDescription("QNLI", _splits(("question", "sentence"), "label", (104743, 5463, 5463)), _ACCURACY, _ENTAILMENT),
    TaskDescription("RTE", _splits(_SENTENCES, "label", (2490, 277, 3000)), _ACCURACY, _ENTAILMENT),
    TaskDescription("WNLI", _splits(_SENTENCES, "label", (635, 71, 146)), _ACCURACY, _BINARY),
    TaskDescription("AX", _AX, ("matthews",), _INFERENCE, model_of="MNLI", own_folder="diagnostic"),
)
# No tasks of GLUE: `lazyformer diagnostics` makes their folders, which the task `glue` reads like prepared tasks.
_DIAGNOSTICS = (
    TaskDescription("ListOps", made_splits(("expression",)), ("accuracy",), tuple("0123456789")),
    TaskDescription("Pairs", made_splits(("first", "second")), ("accuracy",), ("other document", "same document")),
)
TASKS, DIAGNOSTICS = ({task.name: task for task in table} for table in (_TASKS, _DIAGNOSTICS))


def find_task(name: str) -> TaskDescription:
    """The row of a task by its name or folder, whatever the case; UserError, which lists all, for no such task."""
    for task in TASKS.values():
        if name.lower() in (task.name.lower(), task.folder.lower()):
            return task
    raise UserError(f"{name!r} is no GLUE task; known are {', '.join(TASKS)}")


@dataclass(frozen=True)
class Example:
    """One row: one text or two, the class or score (None where the file has none), and the line, from 1."""

    texts: tuple[str, ...]
    target: Optional[Union[int, float]]
    line: int


@dataclass(frozen=True)
class SplitFile:
    """What a file holds: examples in its order, and the lines of :data:`ODDITIES`."""

    path: Path
    examples: list[Example]
    short_lines: list[int]
    empty_lines: list[int] = field(default_factory=list)

    def oddities(self) -> list[str]:
        """A sentence for the user on each kind of odd row."""
        return describe_oddities(self.path, {name: getattr(self, name) for name in ODDITIES})


ODDITIES = {"short_lines": "with too few fields left out", "empty_lines": "with an empty sentence, kept"}


def describe_oddities(file: Union[str, Path], lines: Mapping[str, list[int]]) -> list[str]:
    """:meth:`SplitFile.oddities` of the lines of each kind, as a manifest has them."""
    return [
        f"{file}: {len(numbers):,} row{'s' * (len(numbers) != 1)} {what} (line {', '.join(map(str, numbers[:5]))}"
        f"{', ...' * (len(numbers) > 5)})"
        for name, what in ODDITIES.items()
        if (numbers := lines.get(name))
    ]


def read_split(task: TaskDescription, folder: Union[str, Path], split: str) -> SplitFile:
    """Reads a split of a task.

    Args:
        folder: where the task's files lie.
        split: a name in `task.splits`.

    Raises:
        UserError: no such split, file, column, label or score; a row with too few or too many fields, or an empty
            sentence; text that is not UTF-8.
    """
    if split not in task.splits:
        raise UserError(f"{task.name} has no split {split!r}; it has {', '.join(task.splits)}")
    layout = task.splits[split]
    path = Path(folder) / layout.file
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path}: is empty; download the task's data again")
    if layout.has_header:
        texts, label, width = *_find_columns(path, layout, header=first[1]), len(first[1])
    else:
        texts, label, width = layout.texts, layout.label, 1 + max(*layout.texts, layout.label)
        rows = itertools.chain([first], rows)
    file = _read_rows(task, path, rows, list(texts), label, width)
    if not file.examples:
        raise UserError(f"{path}: has no row of data; download the task's data again")
    return file


Rows = Iterator[tuple[int, list[str]]]


def _rows(path: Path) -> Rows:
    """Line numbers from 1 and fields; drops a byte order mark (MRPC has one) and a line's final carriage return."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path}, line {number}: not UTF-8 text ({error.reason} at byte {error.start}); "
                        "convert the file to UTF-8"
                    ) from None
                yield number, text.split("\t")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is {path.parent} the task's folder?") from None


def _find_columns(path: Path, layout: Split, header: list[str]) -> tuple[list[int], Optional[int]]:
    """Numbers of the text columns, and of the label's (None where there is none)."""
    wanted = [*layout.texts, *filter(None, [layout.label])]
    if missing := [name for name in wanted if name not in header]:
        lacking, found = (", ".join(map(repr, names)) for names in (missing, header))
        raise UserError(
            f"{path}, line 1: the header lacks {lacking}; found {found}. Is it the official file of this split, "
            "header and all?"
        )
    columns = list(map(header.index, wanted))
    return columns[: len(layout.texts)], columns[-1] if layout.label else None


def _read_rows(
    task: TaskDescription, path: Path, rows: Rows, text_columns: list[int], label_column: Optional[int], width: int
) -> SplitFile:
    file = SplitFile(path, [], [])
    for number, fields in rows:
        if len(fields) < width and task.has_odd_rows:
            file.short_lines.append(number)
            continue
        if len(fields) != width:
            raise UserError(
                f"{path}, line {number}: found {len(fields)} field{'s' * (len(fields) != 1)}, needed {width}; is the "
                "file cut off, are its columns not divided by tabs, or is there a tab in a sentence? Make it a space"
            )
        texts = tuple(fields[column] for column in text_columns)
        if not all(text.strip() for text in texts):
            if label_column is not None and not task.has_odd_rows:  # each row of a test set needs an answer
                raise UserError(f"{path}, line {number}: a sentence is empty; mend the row, or remove it")
            file.empty_lines.append(number)
        try:
            target = None if label_column is None else task.target(fields[label_column])
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}; download the task's data again, or mend it") from None
        file.examples.append(Example(texts, target, number))
    return file
