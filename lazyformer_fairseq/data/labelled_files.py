"""Files of labelled texts: the description of a task on them, from GLUE or the user, and the reader of all formats.

In TSV files, a quotation mark is a character like any other (QUOTE_NONE), because GLUE's texts have unpaired ones. So a
row is a line that is split at its tabs. Only a line feed ends it, because texts contain other characters that Unicode
counts as line ends. CSV files have quotation marks around fields that contain commas, quotation marks or line ends. In
JSON lines, each line is an object. A CoNLL file has a word per line, in the first of its columns, with the word's tag
in the last; an empty line ends a sentence. Here the sentence is a row of two columns: its words, and their tags.
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
NEW_DOCUMENT = "-DOCSTART-"  # the first column of a CoNLL file's line that is not a word
OUTSIDE = "O"  # the tag of a word outside all entities
MOST_SHOWN = 12  # labels that a message lists
NAME = re.compile(r"\w[\w.+@-]*")  # of a task, which is also the name of folders
# A number with a leading zero, such as 007, is a code and stays as it is written.
NUMBER = re.compile(r"[+-]?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]{1,2})?")
# What pandas, R and databases write for a missing label, in any case; of Python's None, other spellings may be labels.
MISSING = re.compile(r"(?i:nan|<na>|null)|None")


def class_name(word: str) -> str:
    """Return the class that `word` in a label column names; a whole number is reduced to its digits.

    pandas writes the classes 0 and 1 as 0.0 and 1.0 if a label of the column is missing, and numpy writes 1.000e+00.
    """
    if NUMBER.fullmatch(word):
        number = Decimal(word)
        if number == number.to_integral_value():
            return str(int(number))
    return word


def listed_labels(word: str) -> Optional[list[str]]:
    """Return the labels if `word` in a label column is a JSON list, such as ``["anger", "joy"]``, or else None."""
    if not word.lstrip().startswith("["):
        return None
    try:
        return list(map(_field_of, parse_json(word)))
    except (ValueError, RecursionError):
        return None


def words_of(text: str) -> list[str]:
    """Split a text into words at spaces and tabs; a no-break space is part of a word."""
    return re.findall(r"[^ \t]+", text)


@dataclass(frozen=True)
class Split:
    """A file of a task.

    Attributes:
        file: name of the file in the task's folder.
        texts: the columns of a text or a pair of texts: names if the file has a header, otherwise numbers from 0.
        label: the column of the label, likewise; None if the file has no labels.
        rows: number of examples in the official file, without rows that have too few fields.
        templates: one or two texts, each made from several columns by name, such as ``Question: {question}``; empty if
            the columns are the texts.
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
    """The description of a task: a row of the table of tasks.

    Attributes:
        name: name of the task, as papers print it.
        splits: the file of each split, by fairseq's name of the split (`train`, `valid`, `valid1`, `test`, `test1`).
        metrics: names in :data:`lazyformer_fairseq.evaluation.metrics.METRICS`; the first selects the checkpoint.
        labels: the words of the label column; a word's place is its class. Empty if scores are predicted.
        score_range: lowest and highest score, if scores are predicted.
        epochs: number of epochs of fine-tuning.
        has_odd_rows: whether the official files are known to have rows with too few fields, which are skipped, and
            two empty sentences, which are kept; both are counted.
        model_of: the task whose model and labels predict this task, if it has no training data of its own.
        official_folder: folder of the official download, if it does not have the task's name.
        is_custom: whether this is a user's task rather than a published one.
        standard: mean and standard deviation of the training scores, if the head learns scores in these units; so
            scores of any range are learnt alike.
        longest: number of ids of the longest input in training, if a checkpoint tells it.
        is_multi_label: whether a row has a list of labels, each predicted by its own sigmoid.
        tags_words: whether a row is a sentence in which each word has a label.
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
        """Return the description that :meth:`as_json` wrote.

        Args:
            found: the JSON object.
            where: its file, for messages.

        Raises:
            UserError: the object is anything else; the message names the file.
        """
        task = as_type(cls, found, f"{where}: does not say what its labels are", "fine-tune again")
        if not NAME.fullmatch(task.name):
            raise UserError(f"{where}: does not say what its labels are: the task is called {task.name[:40]!r}")
        return task

    @property
    def folder(self) -> str:
        """Name of the folder of the official download."""
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
        """True if scores are predicted."""
        return self.score_range is not None or self.standard is not None

    @property
    def num_classes(self) -> int:
        """Number of outputs of the classification head; 1 if scores are predicted."""
        return len(self.labels) or 1

    @property
    def head_name(self) -> str:
        """Name of the classification head in a model; a custom task never has a name that GLUE or torch uses."""
        if self.is_custom:
            return "custom_" + re.sub(r"[^A-Za-z0-9]", "_", self.name)
        return (self.model_of or self.name).lower()

    @property
    def remedy(self) -> str:
        """Advice for a file with mistakes."""
        if self.tags_words:
            return "write a word and its tag per line, and an empty line after each sentence"
        if self.is_custom:
            return "write a line of column names, and rows under it"
        return "download the task's data again"

    def target(self, word: str) -> "Target":
        """Return the class (from 0) or score for `word` in a label column, or the word if classes are not known yet.

        For a list of labels, return 0 or 1 per label of the task or, if these are not known yet, the labels in the
        list. If words have tags, `word` is a single tag.

        Raises:
            UserError: `word` is not a label of the task; the message lists the labels, and the caller adds the line.
        """
        if not self.is_multi_label:
            return self._class_or_score(word)
        listed = listed_labels(word)
        if listed is None:
            raise UserError(f'label {word!r} is not a list, but other rows have lists, such as ["joy"]')
        found = tuple(map(self._class_or_score, listed))
        if not self.labels:
            return found
        return tuple(int(number in found) for number in range(len(self.labels)))

    def target_of(self, label: Any) -> "Target":
        """Return the target for the label of a :class:`~lazyformer_fairseq.evaluation.inference.Prediction`."""
        if self.is_regression:
            return label
        if self.is_multi_label:
            return tuple(int(each in label) for each in self.labels)
        return self.labels.index(label)

    def word_of(self, target: Any) -> str:
        """Return the label that a target stands for, as it is written in a file."""
        if self.is_regression:
            return f"{target:g}"
        if self.is_multi_label:
            return json.dumps([label for label, is_there in zip(self.labels, target, strict=True) if is_there])
        return self.labels[int(target)]

    def _class_or_score(self, word: str) -> Union[int, float, str]:
        if self.is_custom:
            word = word.strip()
            if not word:
                raise UserError("the label is empty")
            if MISSING.fullmatch(word):
                raise UserError(f"the label {word!r} stands for a missing label")
            if re.search(r"[\t\r\n]", word):
                raise UserError(f"the label {word!r} contains a tab or a line break, which separates labels in files")
            if listed_labels(word) is not None:
                raise UserError(f"the label {word[:40]} is a list; write a list of labels in each row, or in none")
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
                known += ", which are those of the training file (if the label is right, add rows with it there)"
            raise UserError(f"label {word!r} is not one of {self.name}'s labels {known}")
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
        raise UserError(f"score {word!r} is not a number{limits}, as the scores of {self.name} are{classes}")


Target = Union[int, float, str, tuple[Union[int, float, str], ...]]


@dataclass(frozen=True)
class Example:
    """A row as an example.

    Attributes:
        texts: one text or two.
        target: the class or score; None if the file has none. If the classes are not known yet, it is the label as
            written; see :meth:`TaskDescription.target`.
        line: number of the line, from 1.
    """

    texts: tuple[str, ...]
    target: Optional[Target]
    line: int


@dataclass(frozen=True)
class SplitFile:
    """The examples of a file, in its order, and the numbers of the lines with :data:`ODDITIES`."""

    path: Path
    examples: list[Example]
    short_lines: list[int]
    empty_lines: list[int] = field(default_factory=list)

    def oddities(self) -> list[str]:
        """Return a sentence for the user about each type of odd row in the file."""
        return describe_oddities(self.path, {name: getattr(self, name) for name in ODDITIES})


ODDITIES = {"short_lines": "with too few fields, left out", "empty_lines": "with an empty sentence, kept"}


def describe_oddities(file: Union[str, Path], lines: Mapping[str, list[int]]) -> list[str]:
    """Return the sentences of :meth:`SplitFile.oddities`, given the lines of each type as a manifest has them."""
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
    """A row as it is in a file.

    Attributes:
        line: number of the line, from 1.
        fields: the fields of the row.
        whole: the object that has the fields, if the file has JSON lines.
    """

    line: int
    fields: list[str]
    whole: Optional[dict[str, Any]] = None


@dataclass(frozen=True)
class RowReader:
    """A reader of the texts and labels in a file's rows, which knows their places.

    Attributes:
        path: path of the file, for messages.
        names: names of the columns, or their numbers from 1 if the file has no names.
        texts: places of one text or two.
        label: place of the label; None if the file has none.
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
        """Return the reader of a file's rows.

        Args:
            path: path of the file.
            first: fields of the first row, which are the names of the columns if these are given by name.
            texts: columns of the texts, which must exist.
            label: column of the label, which must exist; None for no label.
            templates: see :class:`Split`.

        Raises:
            UserError: two columns have the name of a text or of the label.
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
                    "all but the one to use"
                )

        def place_of(column: Column) -> int:
            if isinstance(column, int):
                return column
            return first.index(column)

        place_of_label = None
        if label is not None:
            place_of_label = place_of(label)
        return cls(path, first, tuple(map(place_of, texts)), place_of_label, templates)

    def texts_of(self, row: FileRow) -> tuple[str, ...]:
        """Return the texts of a row, which may be empty.

        Raises:
            UserError: the row has too few or too many fields, or a list or an object in place of a text.
        """
        if len(row.fields) != len(self.names):
            noun = "field" if len(row.fields) == 1 else "fields"
            raise UserError(
                f"{self.path}, line {row.line}: found {len(row.fields)} {noun}, needed {len(self.names)}; is the "
                "file truncated, are its columns not separated as its ending says, or is there a tab in a sentence? "
                "Replace such a tab by a space"
            )
        fields = tuple(self._plain(row, place, "write one text there") for place in self.texts)
        if not self.templates:
            return fields
        by_name = dict(zip((self.names[place] for place in self.texts), fields, strict=True))
        return tuple(template.format(**by_name) for template in self.templates)

    def label_of(self, row: FileRow) -> Optional[str]:
        """Return the label of a row, with a list of labels as JSON; raise a UserError if the label is an object."""
        if self.label is None:
            return None
        return self._plain(row, self.label, "a label is a word, a number, true or false, or a list of these", dict)

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
        UserError: the split, the file or a column does not exist, a label or score is not one of the task's, a row has
            too few or too many fields or an empty sentence, or the text is not UTF-8.
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
        _refuse_missing_columns(task, path, layout, first.fields)
    else:
        rows = itertools.chain([first], rows)
    reader = RowReader.of(path, first.fields, layout.texts, layout.label, layout.templates)
    file = _read_rows(task, reader, rows)
    if not file.examples:
        raise UserError(f"{path}: has no row of data; {task.remedy}")
    return file


def _refuse_missing_columns(task: TaskDescription, path: Path, layout: Split, header: list[str]) -> None:
    wanted = [*layout.texts, *filter(None, [layout.label])]
    missing = [name for name in wanted if name not in header]
    if missing:
        remedy = "Is it the official file of this split, with its header?"
        if task.is_custom:
            remedy = "Both files need the same column names"
        lacking = ", ".join(map(repr, missing))
        found = ", ".join(map(repr, header))
        raise UserError(f"{path}, line 1: the header lacks {lacking}; found {found}. {remedy}")


def _read_rows(task: TaskDescription, reader: RowReader, rows: Iterator[FileRow]) -> SplitFile:
    path = reader.path
    width = len(reader.names)
    file = SplitFile(path, [], [])
    first_line: dict[bool, int] = {}  # of a label that is true or false, and of any other label
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
                names = ", ".join(repr(name[:40]) for name in list(row.whole)[:MOST_SHOWN])
                there = f" (its fields are {names})"
            raise UserError(
                f"{path}, line {row.line}: a sentence is empty, in column {empty[0]!r}{there}; correct the row, or "
                "remove it"
            )
        if empty:
            file.empty_lines.append(row.line)
        target = None
        label = reader.label_of(row)
        if reader.label is not None and label is not None:
            is_boolean = row.whole is not None and isinstance(row.whole.get(reader.names[reader.label]), bool)
            first_line.setdefault(is_boolean, row.line)
            if len(first_line) > 1:
                raise UserError(
                    f"{path}: the label is true or false in line {first_line[True]}, but not in line "
                    f"{first_line[False]}; write all labels in the same way"
                )
            target = target_of_row(task, path, row, label)
        file.examples.append(Example(texts, target, row.line))
    return file


def target_of_row(task: TaskDescription, path: Path, row: FileRow, label: str) -> Any:
    """Return the target of a row's label, or a tuple of targets if words have tags.

    Raises:
        UserError: the label is wrong; the message names its line.
    """
    parts = [label]
    if task.tags_words:  # each tag is on a line of its own
        parts = label.split(" ")
    targets = []
    for line, part in enumerate(parts, start=row.line):
        try:
            targets.append(task.target(part))
        except UserError as error:
            remedy = "download the task's data again, or correct it"
            if task.is_custom:
                remedy = "correct the row, or remove it"
            raise UserError(f"{path}, line {line}: {error}; {remedy}") from None
    if task.tags_words:
        return tuple(targets)
    return targets[0]


def read_rows(path: Path, seen: Optional[Callable[[int], Any]] = None) -> Iterator[FileRow]:
    """Yield the rows of a file, by its ending: .tsv, .csv, .jsonl, .txt (a text per line) or .conll (a word per line).

    The first row has the names of the columns, if the file has any. For JSON lines it has the names of the fields of
    all objects, since the first object may lack some; the file is read twice for this.

    Args:
        path: path of the file.
        seen: is called with the number of bytes of each line.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or has a line that is not a row; the message names it.
    """
    lines = read_lines(path, seen)
    suffix = path.suffix.lower()
    if suffix == ".csv":
        yield from _csv_rows(path, lines)
    elif suffix == ".jsonl":
        names = list(dict.fromkeys(name for _, found in _json_objects(path, read_lines(path)) for name in found))
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
    """Return a JSON value as a field, which is empty for null, NaN and a missing value."""
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return json.dumps(value)


def read_lines(path: Path, seen: Optional[Callable[[int], Any]] = None) -> Iterator[tuple[int, str]]:
    """Yield the number (from 1) and the text of each line, without its end and a byte order mark (MRPC has one)."""
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
    """Yield the column names of a CoNLL file, then a row per sentence; a word without a tag gets an empty one."""
    yield FileRow(0, ["text", "label"])
    rows = ((number, words_of(line)) for number, line in lines)
    for are_words, group in itertools.groupby(rows, key=lambda row: row[1][:1] not in ([], [NEW_DOCUMENT])):
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
            f"{path}, line {start}: not valid CSV ({error}); put a field that contains a comma, a quotation mark or a "
            "line end in quotation marks, and double the quotation marks in it"
        ) from None


def _json_objects(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the object of each line that is not empty, with the line's number."""
    for number, line in lines:
        if not line.strip():
            continue
        try:
            found = parse_json(line)
            if not isinstance(found, dict):
                raise ValueError(f"{type(found).__name__} found")
            json.dumps(found, ensure_ascii=False).encode()  # fails for half a surrogate pair, which cannot be written
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}: not a JSON object ({error}); each line must be one, such as "
                '{"text": "A sentence.", "label": "good"}'
            ) from None
        yield number, found
