"""Readers for labeled text files in all supported formats, and descriptions of fine-tuning tasks.

In TSV files, quotation marks have no special meaning (QUOTE_NONE) because GLUE's texts contain unpaired ones. Each row
is a line split at its tabs. Only a line feed ends a line, because texts contain other characters that Unicode treats as
line breaks. In CSV files, fields that contain commas, quotation marks or line breaks are quoted. In JSON lines files,
each line is an object. CoNLL files have one word per line, with the word in the first column and its tag in the last,
and an empty line after each sentence. Such a sentence is read as one row of two columns: its words and their tags.
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
from lazyformer_fairseq.storage.checked import Finite, PositiveAmount, as_type, parse_json

Column = Union[int, str]
CONLL = ".conll"
NEW_DOCUMENT = "-DOCSTART-"  # first column of the line that starts a document in CoNLL files
OUTSIDE = "O"  # tag of words outside all entities
MOST_SHOWN = 12  # maximum number of labels listed in a message
NAME = re.compile(r"\w[\w.+@-]*")  # task names, which are also folder names
# A number with a leading zero, such as 007, is treated as a code and stays as written.
NUMBER = re.compile(r"[+-]?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]{1,2})?")
# Placeholders that pandas, R and databases write for a missing label, in upper or lower case. Python's None must match
# exactly, because "none" may be a label.
MISSING = re.compile(r"(?i:nan|<na>|null)|None")


def class_name(word: str) -> str:
    """Return the class name for `word` in a label column; whole numbers are normalized to integers.

    If a label in the column is missing, pandas writes the classes 0 and 1 as 0.0 and 1.0. NumPy writes 1 as 1.000e+00.
    """
    if NUMBER.fullmatch(word):
        number = Decimal(word)
        if number == number.to_integral_value():
            return str(int(number))
    return word


def parse_label_list(word: str) -> Optional[list[str]]:
    """Parse `word` in a label column as a JSON list such as ``["anger", "joy"]``; return None if it is not a list."""
    if not word.lstrip().startswith("["):
        return None
    try:
        return list(map(_field_of, parse_json(word)))
    except (ValueError, RecursionError):
        return None


def words_of(text: str) -> list[str]:
    """Split a text into words at spaces and tabs, but not at no-break spaces."""
    return re.findall(r"[^ \t]+", text)


@dataclass(frozen=True)
class Split:
    """The layout of one split's file.

    Attributes:
        file: name of the file in the task's folder.
        texts: columns of the text or pair of texts, as names if the file has a header and otherwise as indices from 0.
        label: name or index of the label column; None if the file has no labels.
        rows: number of examples in the official file, excluding rows with too few fields.
        templates: one or two format strings that build the texts from named columns, such as ``Question: {question}``;
            empty if the columns are used as they are.
    """

    file: str
    texts: tuple[Column, ...]
    label: Optional[Column]
    rows: int
    templates: tuple[str, ...] = ()

    @property
    def has_header(self) -> bool:
        """True if the first row names the columns."""
        return isinstance(self.texts[0], str)


@dataclass(frozen=True)
class TaskDescription:
    """A fine-tuning task: its files, labels and metrics.

    Attributes:
        name: name of the task, as spelled in papers.
        splits: layout of each split's file, by fairseq's split names (`train`, `valid`, `valid1`, `test`, `test1`).
        metrics: names in :data:`lazyformer_fairseq.evaluation.metrics.METRICS`; the first one selects the checkpoint.
        labels: values of the label column, in class-index order; empty for regression.
        score_range: lowest and highest regression target, if they are known.
        epochs: number of fine-tuning epochs.
        has_odd_rows: whether the official files are known to contain rows with too few fields, which are skipped, and
            two empty sentences, which are kept; both are counted.
        model_of: the task whose model and labels are used for this one, if this one has no training data.
        official_folder: folder name in the official download, if it differs from the task's name.
        is_custom: whether this is a user's task rather than a published one.
        standard: mean and standard deviation of the training targets, if the head is trained on standardized
            regression targets. This makes training independent of the targets' range.
        longest: number of ids in the longest training input, if recorded in a checkpoint.
        is_multi_label: whether a row has a list of labels, each predicted by a separate sigmoid.
        tags_words: whether a row is a sentence with one label per word.
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
    standard: Optional[tuple[Finite, PositiveAmount]] = None
    longest: Optional[int] = None
    is_multi_label: bool = False
    tags_words: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the description as a JSON object."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, found: Any, where: Union[str, Path]) -> "TaskDescription":
        """Parse a description written by :meth:`as_json`.

        Args:
            found: the parsed JSON.
            where: path of the file, for messages.

        Raises:
            UserError: the JSON is not a task description; the message names the file.
        """
        task = as_type(cls, found, f"{where}: not a valid task description", "fine-tune again")
        if not NAME.fullmatch(task.name):
            raise UserError(f"{where}: not a valid task description, because the task is called {task.name[:40]!r}")
        return task

    @property
    def folder(self) -> str:
        """Name of the task's folder in the official download."""
        return self.official_folder or self.name

    @property
    def selecting_metric(self) -> str:
        """Metric that selects the checkpoint."""
        return self.metrics[0]

    @property
    def is_pair(self) -> bool:
        """True if rows have two texts."""
        return any(len(split.templates or split.texts) == 2 for split in self.splits.values())

    @property
    def is_regression(self) -> bool:
        """True if the task is regression."""
        return self.score_range is not None or self.standard is not None

    @property
    def num_classes(self) -> int:
        """Number of outputs of the classification head; 1 for regression."""
        return len(self.labels) or 1

    @property
    def head_name(self) -> str:
        """Name of the classification head in a model; a prefix keeps custom names distinct from GLUE's."""
        if self.is_custom:
            return "custom_" + re.sub(r"[^A-Za-z0-9]", "_", self.name)
        return (self.model_of or self.name).lower()

    @property
    def remedy(self) -> str:
        """Advice for a file with mistakes."""
        if self.tags_words:
            return "write one word and its tag per line, and an empty line after each sentence"
        if self.is_custom:
            return "write a line of column names, followed by the rows"
        return "download the task's data again"

    def target(self, word: str) -> "Target":
        """Convert `word` in a label column to a class index or a regression target.

        If the task's labels are not known yet, return the label itself. For a multi-label task, return a 0 or 1 for
        each of the task's labels or, if they are not known yet, the labels in the list. For a tagging task, `word` is a
        single tag.

        Raises:
            UserError: `word` is not one of the task's labels; the message lists them, and the caller adds the line.
        """
        if not self.is_multi_label:
            return self._class_or_score(word)
        listed = parse_label_list(word)
        if listed is None:
            raise UserError(f'label {word!r} is not a list such as ["joy"], but other rows have lists')
        found = tuple(map(self._class_or_score, listed))
        if not self.labels:
            return found
        return tuple(int(number in found) for number in range(len(self.labels)))

    def target_of(self, label: Any) -> "Target":
        """Convert the label of a :class:`~lazyformer_fairseq.evaluation.inference.Prediction` to a target."""
        if self.is_regression:
            return label
        if self.is_multi_label:
            return tuple(int(each in label) for each in self.labels)
        return self.labels.index(label)

    def word_of(self, target: Any) -> str:
        """Convert a target to its label as written in a file."""
        if self.is_regression:
            return f"{target:g}"
        if self.is_multi_label:
            labels = [label for label, is_there in zip(self.labels, target, strict=True) if is_there]
            return json.dumps(labels)
        return self.labels[int(target)]

    def _class_or_score(self, word: str) -> Union[int, float, str]:
        if self.is_custom:
            word = word.strip()
            if not word:
                raise UserError("the label is empty")
            if MISSING.fullmatch(word):
                raise UserError(f"the label {word!r} looks like a placeholder for a missing value")
            if re.search(r"[\t\r\n]", word):
                raise UserError(
                    f"the label {word!r} contains a tab or a line break, which are used to separate labels in files"
                )
            if parse_label_list(word) is not None:
                raise UserError(f"the label {word[:40]} is a list; use lists either in all rows or in none")
        if self.is_regression:
            return self._score(word)
        word = class_name(word)
        if not self.labels:
            return word
        if word not in self.labels:
            known = ", ".join(self.labels[:MOST_SHOWN])
            if len(self.labels) > MOST_SHOWN:
                known += ", ..."
            if self.is_custom:
                known += " (taken from the training file; if this label is correct, add rows with it to that file)"
            raise UserError(f"label {word!r} is not one of {self.name}'s labels: {known}")
        return self.labels.index(word)

    def _score(self, word: str) -> float:
        lowest, highest = self.score_range or (-math.inf, math.inf)
        with suppress(ValueError):
            score = float(word)
            if math.isfinite(score) and lowest <= score <= highest:
                return score
        limits = ""
        if self.score_range:
            limits = f" from {lowest:g} to {highest:g}"
        classes = ""
        if self.is_custom:
            classes = " (--label-type classes allows any label)"
        raise UserError(f"score {word!r} is not a number{limits}, as {self.name} requires{classes}")


Target = Union[int, float, str, tuple[Union[int, float, str], ...]]


@dataclass(frozen=True)
class Example:
    """One example of a task.

    Attributes:
        texts: one or two texts.
        target: class index or regression target; None if the file has no labels. If the task's labels are not known
            yet, the target is the label as written; see :meth:`TaskDescription.target`.
        line: line number in the file, from 1.
    """

    texts: tuple[str, ...]
    target: Optional[Target]
    line: int


@dataclass(frozen=True)
class SplitFile:
    """A file's examples in order, and the line numbers of each type of odd row (:data:`ODDITIES`)."""

    path: Path
    examples: list[Example]
    short_lines: list[int]
    empty_lines: list[int] = field(default_factory=list)

    def oddities(self) -> list[str]:
        """Return one message per type of odd row in the file."""
        return describe_oddities(self.path, {name: getattr(self, name) for name in ODDITIES})


ODDITIES = {"short_lines": "with too few fields, skipped", "empty_lines": "with an empty sentence, kept"}


def describe_oddities(file: Union[str, Path], lines: Mapping[str, list[int]]) -> list[str]:
    """Return the messages of :meth:`SplitFile.oddities`, given each type's line numbers, as in a manifest."""
    said = []
    for name, what in ODDITIES.items():
        numbers = lines.get(name)
        if numbers:
            rows = "row" if len(numbers) == 1 else "rows"
            shown = ", ".join(map(str, numbers[:5]))
            if len(numbers) > 5:
                shown += ", ..."
            said.append(f"{file}: {len(numbers):,} {rows} {what} (line {shown})")
    return said


class FileRow(NamedTuple):
    """A file's row before its texts and label are extracted.

    Attributes:
        line: line number, from 1.
        fields: the row's fields.
        whole: the JSON object with these fields, if the file is a JSON lines file.
    """

    line: int
    fields: list[str]
    whole: Optional[dict[str, Any]] = None


@dataclass(frozen=True)
class RowReader:
    """A reader that extracts the texts and labels from a file's rows.

    Attributes:
        path: path of the file, for messages.
        names: column names, or numbers from 1 if the file has no header.
        texts: indices of one or two text columns.
        label: index of the label column; None if the file has no labels.
        templates: see :class:`Split`.
    """

    path: Path
    names: Sequence[str]
    texts: tuple[int, ...]
    label: Optional[int]
    templates: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        path: Path,
        first: Sequence[str],
        texts: Sequence[Column],
        label: Optional[Column],
        templates: tuple[str, ...] = (),
    ) -> "RowReader":
        """Create the reader for a file, given the file's first row.

        Args:
            path: path of the file.
            first: fields of the first row; these are the column names if `texts` and `label` are names.
            texts: text columns, which must exist.
            label: label column, which must exist; None for no label.
            templates: see :class:`Split`.

        Raises:
            UserError: two columns share the name of a text or label column.
        """
        wanted = [column for column in (*texts, label) if column is not None]
        numbers = [column for column in wanted if isinstance(column, int)]
        if numbers:
            width = max(len(first), 1 + max(numbers))
            first = [str(number) for number in range(1, width + 1)]
        for name in wanted:
            places = [str(place) for place, other in enumerate(first, start=1) if other == name]
            if len(places) > 1:
                raise UserError(
                    f"{path}, line 1: {len(places)} columns are called {name!r} (columns {', '.join(places)}); rename "
                    "all but the one that should be used"
                )

        def column_index(column: Column) -> int:
            if isinstance(column, int):
                return column
            return first.index(column)

        place_of_label = None
        if label is not None:
            place_of_label = column_index(label)
        return cls(path, first, tuple(map(column_index, texts)), place_of_label, templates)

    def texts_of(self, row: FileRow) -> tuple[str, ...]:
        """Return a row's texts, which may be empty.

        Raises:
            UserError: the row has too few or too many fields, or contains a list or an object instead of a text.
        """
        if len(row.fields) != len(self.names):
            noun = "field" if len(row.fields) == 1 else "fields"
            raise UserError(
                f"{self.path}, line {row.line}: found {len(row.fields)} {noun}, expected {len(self.names)}. Is the "
                "file truncated, does its extension not match its column separator, or is there a tab in a sentence? "
                "Replace such a tab with a space"
            )
        fields = tuple(self._plain(row, place, "use a single text instead") for place in self.texts)
        if not self.templates:
            return fields
        names = [self.names[place] for place in self.texts]
        by_name = dict(zip(names, fields, strict=True))
        return tuple(template.format(**by_name) for template in self.templates)

    def label_of(self, row: FileRow) -> Optional[str]:
        """Return a row's label, as JSON if it is a list of labels; raise a UserError if the label is an object."""
        if self.label is None:
            return None
        return self._plain(row, self.label, "a label must be a word, a number, true, false or a list of these", dict)

    def _plain(self, row: FileRow, place: int, remedy: str, refused: Any = (list, dict)) -> str:
        value = None
        if row.whole is not None:
            value = row.whole.get(self.names[place])
        if isinstance(value, refused):
            held = "a list" if isinstance(value, list) else "an object"
            raise UserError(
                f"{self.path}, line {row.line}: the field {self.names[place]!r} is {held}, {row.fields[place][:40]}; "
                f"{remedy}"
            )
        return row.fields[place]


def read_split(task: TaskDescription, folder: Union[str, Path], split: str) -> SplitFile:
    """Read a split of a task.

    Args:
        task: description of the task.
        folder: folder of the task's files.
        split: a name in `task.splits`.

    Raises:
        UserError: the split, the file or a column does not exist, a label is invalid, a row has too few or too many
            fields or an empty sentence, or the text is not UTF-8.
    """
    if split not in task.splits:
        raise UserError(f"{task.name} has no split {split!r}; its splits are {', '.join(task.splits)}")
    layout = task.splits[split]
    path = Path(folder) / layout.file
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path} is empty; {task.remedy}")
    if layout.has_header:
        _refuse_missing_columns(task, path, layout, first.fields)
    else:
        rows = itertools.chain([first], rows)
    reader = RowReader.of(path, first.fields, layout.texts, layout.label, layout.templates)
    file = _read_rows(task, reader, rows)
    if not file.examples:
        raise UserError(f"{path} has no data rows; {task.remedy}")
    return file


def _refuse_missing_columns(task: TaskDescription, path: Path, layout: Split, header: list[str]) -> None:
    wanted = [*layout.texts, *filter(None, [layout.label])]
    missing = [name for name in wanted if name not in header]
    if missing:
        remedy = "Is this the split's official file, including its header?"
        if task.is_custom:
            remedy = "Both files need the same column names"
        lacking = ", ".join(map(repr, missing))
        found = ", ".join(map(repr, header))
        raise UserError(f"{path}, line 1: the header lacks {lacking}; found {found}. {remedy}")


def _read_rows(task: TaskDescription, reader: RowReader, rows: Iterator[FileRow]) -> SplitFile:
    path = reader.path
    width = len(reader.names)
    file = SplitFile(path, [], [])
    first_line: dict[bool, int] = {}  # line of the first boolean label (True) and of the first other label (False)
    for row in rows:
        if len(row.fields) < width and task.has_odd_rows:
            file.short_lines.append(row.line)
            continue
        if row.fields == [""] and width > 1:
            continue

        texts = reader.texts_of(row)
        empty = [reader.names[place] for place in reader.texts if not row.fields[place].strip()]
        if empty and reader.label is not None and not task.has_odd_rows:  # a test set needs an answer for each row
            there = ""
            if row.whole is not None:
                shown = list(row.whole)[:MOST_SHOWN]
                names = ", ".join(repr(name[:40]) for name in shown)
                there = f" (its fields are {names})"
            raise UserError(
                f"{path}, line {row.line}: the sentence is empty in column {empty[0]!r}{there}; correct the row or "
                "remove it"
            )
        if empty:
            file.empty_lines.append(row.line)

        target = None
        label = reader.label_of(row)
        if reader.label is not None and label is not None:
            value: Any = label
            if row.whole is not None:
                value = row.whole.get(reader.names[reader.label])
            is_boolean = isinstance(value, bool)
            first_line.setdefault(is_boolean, row.line)
            if len(first_line) > 1:
                raise UserError(
                    f"{path}: the label is true or false in line {first_line[True]}, but not in line "
                    f"{first_line[False]}; use the same type for all labels"
                )
            target = target_of_row(task, path, row, label)
        file.examples.append(Example(texts, target, row.line))
    return file


def target_of_row(task: TaskDescription, path: Path, row: FileRow, label: str) -> Any:
    """Convert a row's label to a target or, for a tagging task, to a tuple with one target per word.

    Raises:
        UserError: the label is invalid; the message names its line.
    """
    parts = [label]
    if task.tags_words:  # each tag is on a separate line of the file
        parts = label.split(" ")
    targets = []
    for line, part in enumerate(parts, start=row.line):
        try:
            targets.append(task.target(part))
        except UserError as error:
            remedy = "download the task's data again or correct it"
            if task.is_custom:
                remedy = "correct the row or remove it"
            raise UserError(f"{path}, line {line}: {error}; {remedy}") from None
    if task.tags_words:
        return tuple(targets)
    return targets[0]


def read_rows(path: Path, seen: Optional[Callable[[int], Any]] = None) -> Iterator[FileRow]:
    """Yield the rows of a .tsv, .csv, .jsonl, .txt (one text per line) or .conll (one word per line) file.

    The first row contains the column names, if the file has any. For a JSON lines file, it contains the field names of
    all objects, because the first object may lack some of them; such a file is therefore read twice.

    Args:
        path: path of the file; its extension determines the format.
        seen: callback that receives the number of bytes of each line.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or has an invalid line; the message names the line.
    """
    lines = read_lines(path, seen)
    suffix = path.suffix.lower()
    if suffix == ".csv":
        yield from _csv_rows(path, lines)
    elif suffix == ".jsonl":
        field_names: dict[str, None] = {}
        for _, found in _json_objects(path, read_lines(path)):
            field_names.update(dict.fromkeys(found))
        names = list(field_names)
        if names:
            yield FileRow(1, names)
        for number, found in _json_objects(path, lines):
            yield FileRow(number, [_field_of(found.get(name)) for name in names], found)
    elif suffix == ".txt":
        yield FileRow(0, ["text"])
        for number, line in lines:
            yield FileRow(number, [line])
    elif suffix == CONLL:
        yield from _sentences(lines)
    else:
        for number, line in lines:
            yield FileRow(number, line.split("\t"))


def _field_of(value: Any) -> str:
    """Convert a JSON value to a field; null, NaN and missing values become an empty field."""
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return json.dumps(value)


def read_lines(path: Path, seen: Optional[Callable[[int], Any]] = None) -> Iterator[tuple[int, str]]:
    """Yield each line's number (from 1) and text, without the line break or a byte order mark (MRPC has one)."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if seen is not None:
                    seen(len(line))
                encoding = "utf-8"
                if number == 1:
                    encoding = "utf-8-sig"
                try:
                    text = line.removesuffix(b"\n").removesuffix(b"\r").decode(encoding)
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path}, line {number}: not UTF-8 text ({error.reason} at byte {error.start}); "
                        "convert the file to UTF-8"
                    ) from None
                yield number, text
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is {path.parent} the task's folder?") from None


def _sentences(lines: Iterator[tuple[int, str]]) -> Iterator[FileRow]:
    """Yield a CoNLL file's column names, followed by one row per sentence; words without a tag get an empty one."""

    def has_word(row: tuple[int, list[str]]) -> bool:
        _, columns = row
        return columns[:1] not in ([], [NEW_DOCUMENT])

    yield FileRow(0, ["text", "label"])
    rows = ((number, words_of(line)) for number, line in lines)
    for are_words, group in itertools.groupby(rows, key=has_word):
        if are_words:
            numbers, columns = zip(*group, strict=True)
            words = [first for first, *_ in columns]
            tags = ["".join(others[-1:]) for _, *others in columns]
            yield FileRow(numbers[0], [" ".join(words), " ".join(tags)])


def _csv_rows(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[FileRow]:
    csv.field_size_limit(2**31 - 1)  # a text may exceed the default limit of 131,072 characters
    reader = csv.reader((f"{line}\n" for _, line in lines), strict=True)
    start = 1
    try:
        for fields in reader:
            if fields:
                yield FileRow(start, fields)
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {start}: not valid CSV ({error}); enclose fields that contain commas, quotation marks or "
            "line breaks in quotation marks, and double the quotation marks inside them"
        ) from None


def _json_objects(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each non-empty line."""
    for number, line in lines:
        if not line.strip():
            continue
        try:
            found = parse_json(line)
            if not isinstance(found, dict):
                raise ValueError(f"{type(found).__name__} found")
            json.dumps(found, ensure_ascii=False).encode()  # fails for an unpaired surrogate, which cannot be encoded
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}: not a JSON object ({error}); each line must be an object such as "
                '{"text": "A sentence.", "label": "good"}'
            ) from None
        yield number, found
