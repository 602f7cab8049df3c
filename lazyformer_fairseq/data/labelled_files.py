"""Files of labelled texts: the row that describes a task on them, GLUE's or a user's own, and their one reader.

In TSV files a quotation mark is a character like any other (QUOTE_NONE): GLUE's texts hold unpaired ones. So a line
divided at its tabs is the row; only a line feed ends it, for texts hold other characters that Unicode calls line ends.
CSV files have quotation marks around fields that hold commas, quotation marks or line ends; a line of JSON lines is an
object.
"""

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from lazyformer_fairseq.errors import UserError

Column = Union[int, str]
MOST_SHOWN = 12  # labels in a message
NAME = re.compile(r"\w[\w.+@-]*")  # of a task: folders are called so


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
        metrics: names in :data:`lazyformer_fairseq.finetuning.metrics.METRICS`; the first selects the checkpoint.
        labels: the words of the label column; a word's place is its class. Empty where scores are predicted.
        score_range: lowest and highest score where scores are predicted.
        epochs: of fine-tuning.
        has_odd_rows: its official files are known to hold rows with too few fields, which are skipped, and two empty
            sentences, which are kept; both are counted.
        model_of: the task whose model and labels it is predicted with, where it has no training data of its own.
        own_folder: of the official download, where it is not called as the task.
        is_own: a user's task, not a published one.
        standard: mean and standard deviation of the training scores, where the head learns multiples of the second from
            the first: scores of any range train alike.
        longest: ids of the longest input in training, where a checkpoint says it.
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
    is_own: bool = False
    standard: Optional[tuple[float, float]] = None
    longest: Optional[int] = None

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, found: Any, where: Union[str, Path]) -> "TaskDescription":
        """What :meth:`as_json` made; UserError, which names the file, for anything else."""
        try:
            splits = {name: Split(**each | {"texts": tuple(each["texts"])}) for name, each in found["splits"].items()}
            several = {name: tuple(found[name]) for name in ("metrics", "labels")}
            pairs = {name: found[name] and tuple(map(float, found[name])) for name in ("score_range", "standard")}
            known = {name: value for name, value in found.items() if name in cls.__dataclass_fields__}
            task = cls(**known | {"splits": splits} | several | pairs)
            words = (task.name, *task.metrics, *task.labels, *(split.file for split in splits.values()))
            mean, deviation = task.standard or (0.0, 1.0)
            is_sound = all(isinstance(word, str) for word in words) and isinstance(task.longest, (int, type(None)))
            if not (is_sound and NAME.fullmatch(task.name) and math.isfinite(mean) and 0 < deviation < math.inf):
                raise ValueError("a field of another type")
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise UserError(f"{where}: does not say what its labels are ({error!r}); fine-tune anew") from None
        return task

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
        return self.score_range is not None or self.standard is not None

    @property
    def num_classes(self) -> int:
        """Outputs of the classification head: 1 where scores are predicted."""
        return len(self.labels) or 1

    @property
    def head_name(self) -> str:
        """Name of the classification head in a model; that of an own task is none of GLUE's, nor of torch's."""
        return f"own_{re.sub(r'[^A-Za-z0-9]', '_', self.name)}" if self.is_own else (self.model_of or self.name).lower()

    @property
    def remedy(self) -> str:
        """What to do where a file is wrong."""
        return "write a line of names, and rows under it" if self.is_own else "download the task's data again"

    def target(self, word: str) -> Union[int, float, str]:
        """The class (from 0) or the score for a label column's `word`; the word itself while neither are known.

        Raises:
            UserError: not a label of the task; the message lists those allowed, the caller adds file and line.
        """
        word = word.strip() if self.is_own else word
        if self.is_own and not word:
            raise UserError("the label is empty")
        if self.is_regression:
            lowest, highest = self.score_range or (-math.inf, math.inf)
            with suppress(ValueError):
                if lowest <= (score := float(word)) <= highest and math.isfinite(score):
                    return score
            limits = f" from {lowest:g} to {highest:g}" if self.score_range else ""
            classes = " (--kind classes takes any)" if self.is_own else ""
            raise UserError(f"score {word!r} is no number{limits}, as {self.name}'s are{classes}")
        if self.labels and word not in self.labels:
            known = ", ".join(self.labels[:MOST_SHOWN]) + ", ..." * (len(self.labels) > MOST_SHOWN)
            unseen = ", which the training file has; put rows of that label there too" if self.is_own else ""
            raise UserError(f"label {word!r} is none of {self.name}'s labels {known}{unseen}")
        return self.labels.index(word) if self.labels else word


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
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path}: is empty; {task.remedy}")
    if layout.has_header:
        texts, label, width = *_find_columns(task, path, layout, header=first.fields), len(first.fields)
    else:
        texts, label, rows = layout.texts, layout.label, itertools.chain([first], rows)
        width = max(len(first.fields), *(1 + column for column in (*texts, label) if column is not None))
    file = _read_rows(task, path, rows, list(texts), label, width)
    if not file.examples:
        raise UserError(f"{path}: has no row of data; {task.remedy}")
    return file


class FileRow(NamedTuple):
    """A row as a file has it: its line, from 1; its fields; of JSON lines also the object that these are of."""

    line: int
    fields: list[str]
    whole: Optional[dict[str, Any]] = None


def read_rows(path: Path, seen: Callable[[int], Any] = lambda size: None) -> Iterator[FileRow]:
    """The rows of a file of texts, by its ending: .tsv, .csv, .jsonl, or .txt, a text a line.

    The first row has the names of columns where the file has any; of JSON lines they are the first object's.

    Args:
        seen: is told the bytes of each line.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or a line is no row; the message names it.
    """
    lines, kind = _lines(path, seen), path.suffix.lower()
    if kind == ".csv":
        yield from _csv_rows(path, lines)
    elif kind == ".jsonl":
        yield from _json_rows(path, lines)
    else:
        yield from ([FileRow(0, ["text"])] if kind == ".txt" else [])
        yield from (FileRow(number, [line] if kind == ".txt" else line.split("\t")) for number, line in lines)


def _lines(path: Path, seen: Callable[[int], Any]) -> Iterator[tuple[int, str]]:
    """Numbers from 1 and text; drops a byte order mark (MRPC has one) and a line's final carriage return."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                seen(len(line))
                try:
                    text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path}, line {number}: not UTF-8 text ({error.reason} at byte {error.start}); "
                        "convert the file to UTF-8"
                    ) from None
                yield number, text
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is {path.parent} the task's folder?") from None


def _csv_rows(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[FileRow]:
    csv.field_size_limit(2**31 - 1)  # a text may have more than the 131,072 characters that are usual
    reader, start = csv.reader((f"{line}\n" for _, line in lines), strict=True), 1
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise UserError(
                f"{path}, line {start}: no CSV ({error}); put a field that holds a comma, a quotation mark or a line "
                "end in quotation marks, and double those in it"
            ) from None
        if fields is None:
            return
        if fields:
            yield FileRow(start, fields)
        start = reader.line_num + 1


def _json_rows(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[FileRow]:
    names: Optional[list[str]] = None
    for number, line in lines:
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}
            json.dumps(found, ensure_ascii=False).encode()  # as it will be written: half a character cannot be
        except (ValueError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}: no JSON object ({error}); a line is one, as in "
                '{"text": "A sentence.", "label": "good"}'
            ) from None
        if names is None:
            names = list(values)
            yield FileRow(number, names)
        yield FileRow(number, ["" if found.get(name) is None else values[name] for name in names], found)


def _find_columns(
    task: TaskDescription, path: Path, layout: Split, header: list[str]
) -> tuple[list[int], Optional[int]]:
    """Numbers of the text columns, and of the label's (None where there is none)."""
    wanted = [*layout.texts, *filter(None, [layout.label])]
    if missing := [name for name in wanted if name not in header]:
        lacking, found = (", ".join(map(repr, names)) for names in (missing, header))
        official = "Is it the official file of this split, header and all?"
        remedy = "Both files need the same names there" if task.is_own else official
        raise UserError(f"{path}, line 1: the header lacks {lacking}; found {found}. {remedy}")
    columns = list(map(header.index, wanted))
    return columns[: len(layout.texts)], columns[-1] if layout.label else None


def _read_rows(
    task: TaskDescription,
    path: Path,
    rows: Iterator[FileRow],
    text_columns: list[int],
    label_column: Optional[int],
    width: int,
) -> SplitFile:
    file = SplitFile(path, [], [])
    for number, fields, _ in rows:
        if len(fields) < width and task.has_odd_rows:
            file.short_lines.append(number)
            continue
        if fields == [""] and width > 1:
            continue
        check_width(path, number, fields, width)
        texts = tuple(fields[column] for column in text_columns)
        if not all(text.strip() for text in texts):
            if label_column is not None and not task.has_odd_rows:  # each row of a test set needs an answer
                raise UserError(f"{path}, line {number}: a sentence is empty; mend the row, or remove it")
            file.empty_lines.append(number)
        try:
            target = None if label_column is None else task.target(fields[label_column])
        except UserError as error:
            remedy = "mend the row, or remove it" if task.is_own else "download the task's data again, or mend it"
            raise UserError(f"{path}, line {number}: {error}; {remedy}") from None
        file.examples.append(Example(texts, target, number))
    return file


def check_width(path: Path, number: int, fields: list[str], width: int) -> None:
    """Raises a UserError, which names the line, where a row has fewer or more fields than the file has columns."""
    if len(fields) != width:
        raise UserError(
            f"{path}, line {number}: found {len(fields)} field{'s' * (len(fields) != 1)}, needed {width}; is the file "
            "cut off, are its columns not divided as its ending says, or is there a tab in a sentence? Make it a space"
        )
