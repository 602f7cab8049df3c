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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from lazyformer_fairseq.errors import UserError

Column = Union[int, str]
MOST_SHOWN = 12  # labels in a message
NAME = re.compile(r"\w[\w.+@-]*")  # of a task: folders are called so
# A leading zero, as in 007, makes a code of a number: it stays as it is written.
NUMBER = re.compile(r"[+-]?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]{1,2})?")
MISSING = ("nan", "<na>", "null")  # what programs write for a label that is not there, in lower case


def class_name(word: str) -> str:
    """Return the name of the class that a label column calls `word`: of a whole number its digits alone.

    pandas writes the classes 0 and 1 as 0.0 and 1.0 where a label of the column is missing, numpy as 1.000e+00.
    """
    if NUMBER.fullmatch(word):
        number = Decimal(word)
        if number == number.to_integral_value():
            return str(int(number))
    return word


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
        metrics: names in :data:`lazyformer_fairseq.evaluation.metrics.METRICS`; the first selects the checkpoint.
        labels: the words of the label column; a word's place is its class. Empty where scores are predicted.
        score_range: lowest and highest score where scores are predicted.
        epochs: of fine-tuning.
        has_odd_rows: its official files are known to hold rows with too few fields, which are skipped, and two empty
            sentences, which are kept; both are counted.
        model_of: the task whose model and labels it is predicted with, where it has no training data of its own.
        official_folder: of the official download, where it is not called as the task.
        is_custom: a user's task, not a published one.
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
    official_folder: str = ""
    is_custom: bool = False
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
        return self.official_folder or self.name

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
        """Name of the classification head in a model; a custom task's is never one of GLUE's, nor of torch's."""
        if self.is_custom:
            return "custom_" + re.sub(r"[^A-Za-z0-9]", "_", self.name)
        return (self.model_of or self.name).lower()

    @property
    def remedy(self) -> str:
        """What to do where a file is wrong."""
        if self.is_custom:
            return "write a line of names, and rows under it"
        return "download the task's data again"

    def target(self, word: str) -> Union[int, float, str]:
        """The class (from 0) or the score for a label column's `word`; the word itself while neither are known.

        Raises:
            UserError: not a label of the task; the message lists those allowed, the caller adds file and line.
        """
        word = word.strip() if self.is_custom else word
        if self.is_custom and not word:
            raise UserError("the label is empty")
        if self.is_custom and word.lower() in MISSING:
            raise UserError(f"the label {word!r} stands for a missing one")
        if self.is_regression:
            lowest, highest = self.score_range or (-math.inf, math.inf)
            with suppress(ValueError):
                if lowest <= (score := float(word)) <= highest and math.isfinite(score):
                    return score
            limits = f" from {lowest:g} to {highest:g}" if self.score_range else ""
            classes = " (--kind classes takes any)" if self.is_custom else ""
            raise UserError(f"score {word!r} is no number{limits}, as {self.name}'s are{classes}")
        word = class_name(word)
        if self.labels and word not in self.labels:
            known = ", ".join(self.labels[:MOST_SHOWN]) + ", ..." * (len(self.labels) > MOST_SHOWN)
            unseen = ", which the training file has; put rows of that label there too" if self.is_custom else ""
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
        _refuse_missing_columns(task, path, layout, header=first.fields)
        reader = reader_of(path, first.fields, layout.texts, layout.label)
    else:
        reader = reader_of(path, first.fields, layout.texts, layout.label)
        rows = itertools.chain([first], rows)
    file = _read_rows(task, reader, rows)
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

    The first row has the names of columns where the file has any. Of JSON lines it has those of all objects, for which
    the file is read twice: a field that the first object lacks is there all the same.

    Args:
        seen: is told the bytes of each line.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or a line is no row; the message names it.
    """
    lines = _lines(path, seen)
    kind = path.suffix.lower()
    if kind == ".csv":
        yield from _csv_rows(path, lines)
    elif kind == ".jsonl":
        every = _json_objects(path, _lines(path))
        names = list(dict.fromkeys(name for _, found in every for name in found))
        yield from ([FileRow(1, names)] if names else [])
        yield from (_json_row(number, found, names) for number, found in _json_objects(path, lines))
    else:
        yield from ([FileRow(0, ["text"])] if kind == ".txt" else [])
        yield from (FileRow(number, [line] if kind == ".txt" else line.split("\t")) for number, line in lines)


def _lines(path: Path, seen: Callable[[int], Any] = lambda size: None) -> Iterator[tuple[int, str]]:
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
    reader = csv.reader((f"{line}\n" for _, line in lines), strict=True)
    start = 1
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


def _json_objects(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the object of each line that is not empty, with the line's number."""
    for number, line in lines:
        if not line.strip():
            continue
        try:
            found = json.loads(line, object_pairs_hook=_without_duplicates)
            if not isinstance(found, dict):
                raise ValueError(f"{type(found).__name__} found")
            json.dumps(found, ensure_ascii=False).encode()  # as it will be written: half a character cannot be
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}: no JSON object ({error}); a line is one, as in "
                '{"text": "A sentence.", "label": "good"}'
            ) from None
        yield number, found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its fields. Raises a ValueError where two have one name: json itself takes the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} is there twice")
    return found


def _json_row(number: int, found: dict[str, Any], names: list[str]) -> FileRow:
    """Make a row of an object; a field that it lacks, or that is null or NaN, is empty."""
    fields = []
    for name in names:
        value = found.get(name)
        if value is None or value != value:
            fields.append("")
        else:
            fields.append(value if isinstance(value, str) else json.dumps(value))
    return FileRow(number, fields, found)


@dataclass(frozen=True)
class RowReader:
    """The places of the texts and of the label in the rows of a file.

    Attributes:
        path: of the file, for messages.
        names: of its columns; of a file without names their numbers from 1.
        texts: places of one text or two.
        label: place of the label; None where the file has none.
    """

    path: Path
    names: Sequence[str]
    texts: tuple[int, ...]
    label: Optional[int]

    def texts_of(self, row: FileRow) -> tuple[str, ...]:
        """Return the texts of a row, which may be empty.

        Raises:
            UserError: the row has too few or too many fields, or a list or an object in place of a text.
        """
        check_width(self.path, row.line, row.fields, len(self.names))
        return tuple(self._plain(row, place, "write one text there") for place in self.texts)

    def label_of(self, row: FileRow) -> Optional[str]:
        """Return the label of a row; UserError where it is a list or an object."""
        if self.label is None:
            return None
        return self._plain(row, self.label, "a row has one label, which is a word, a number, true or false")

    def _plain(self, row: FileRow, place: int, remedy: str) -> str:
        if row.whole is None:
            value = None
        else:
            value = row.whole.get(self.names[place])
        if isinstance(value, (list, dict)):
            if isinstance(value, list):
                kind = "a list"
            else:
                kind = "an object"
            raise UserError(
                f"{self.path}, line {row.line}: the field {self.names[place]!r} is {kind}, {row.fields[place][:40]}; "
                f"{remedy}"
            )
        return row.fields[place]

    def empty_texts(self, row: FileRow) -> list[str]:
        """Return the names of the text columns in which a row has no text."""
        return [self.names[place] for place in self.texts if not row.fields[place].strip()]

    def has_boolean_label(self, row: FileRow) -> bool:
        """Return whether the label is true or false of JSON."""
        return row.whole is not None and isinstance(row.whole.get(self.names[self.label]), bool)


def reader_of(path: Path, first: Sequence[str], texts: Sequence[Column], label: Optional[Column]) -> RowReader:
    """Return the reader of a file's rows.

    Args:
        first: fields of the first row, the names of columns where these are given by name.
        texts, label: columns, which are there.

    Raises:
        UserError: two columns have one of these names.
    """
    if isinstance(texts[0], int):
        width = max(len(first), *(1 + column for column in (*texts, label) if column is not None))
        return RowReader(path, [str(number) for number in range(1, width + 1)], tuple(texts), label)
    for name in filter(None, (*texts, label)):
        if first.count(name) > 1:
            places = ", ".join(str(place) for place, other in enumerate(first, start=1) if other == name)
            raise UserError(
                f"{path}, line 1: {first.count(name)} columns are called {name!r} (columns {places}); rename all but "
                "the one that is meant"
            )
    return RowReader(path, first, tuple(map(first.index, texts)), None if label is None else first.index(label))


def _refuse_missing_columns(task: TaskDescription, path: Path, layout: Split, header: list[str]) -> None:
    wanted = [*layout.texts, *filter(None, [layout.label])]
    if missing := [name for name in wanted if name not in header]:
        lacking, found = (", ".join(map(repr, names)) for names in (missing, header))
        official = "Is it the official file of this split, header and all?"
        if task.is_custom:
            remedy = "Both files need the same names there"
        else:
            remedy = official
        raise UserError(f"{path}, line 1: the header lacks {lacking}; found {found}. {remedy}")


def _read_rows(task: TaskDescription, reader: RowReader, rows: Iterator[FileRow]) -> SplitFile:
    path = reader.path
    width = len(reader.names)
    file = SplitFile(path, [], [])
    first_line: dict[bool, int] = {}  # of a label that is true or false, and of any other
    for row in rows:
        if len(row.fields) < width and task.has_odd_rows:
            file.short_lines.append(row.line)
            continue
        if row.fields == [""] and width > 1:
            continue
        texts = reader.texts_of(row)
        if empty := reader.empty_texts(row):
            if reader.label is not None and not task.has_odd_rows:  # each row of a test set needs an answer
                raise UserError(
                    f"{path}, line {row.line}: a sentence is empty, in column {empty[0]!r}{fields_of(row)}; mend the "
                    "row, or remove it"
                )
            file.empty_lines.append(row.line)
        target = None
        if reader.label is not None:
            label = reader.label_of(row)
            first_line.setdefault(reader.has_boolean_label(row), row.line)
            if len(first_line) > 1:
                raise UserError(
                    f"{path}: the label is true or false in line {first_line[True]}, but not in line "
                    f"{first_line[False]}; write all labels alike"
                )
            try:
                target = task.target(label)
            except UserError as error:
                remedy = "download the task's data again, or mend it"
                if task.is_custom:
                    remedy = "mend the row, or remove it"
                raise UserError(f"{path}, line {row.line}: {error}; {remedy}") from None
        file.examples.append(Example(texts, target, row.line))
    return file


def fields_of(row: FileRow) -> str:
    """Return, for a message, the fields that an object of JSON lines has; nothing for a row of another format."""
    if row.whole is None:
        return ""
    return f" (its fields are {', '.join(repr(name[:40]) for name in list(row.whole)[:MOST_SHOWN])})"


def check_width(path: Path, number: int, fields: list[str], width: int) -> None:
    """Raises a UserError, which names the line, where a row has fewer or more fields than the file has columns."""
    if len(fields) != width:
        raise UserError(
            f"{path}, line {number}: found {len(fields)} field{'s' * (len(fields) != 1)}, needed {width}; is the file "
            "cut off, are its columns not divided as its ending says, or is there a tab in a sentence? Make it a space"
        )
