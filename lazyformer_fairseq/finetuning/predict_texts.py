"""The command ``lazyformer predict MODEL TEXTS``, which appends a fine-tuned model's prediction to each row of a file.

A tagging model writes a CoNLL file with one word and its tag per line, or appends a list of tags to each row. If the
input is a CoNLL file, its lines are copied and the tag becomes an additional last column.
"""

import csv
import io
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.data.labelled_files import (
    CONLL,
    MOST_SHOWN,
    OUTSIDE,
    FileRow,
    RowReader,
    TaskDescription,
    read_lines,
    read_rows,
    target_of_row,
    words_of,
)
from lazyformer_fairseq.data.text.interface import truncation_message, unknown_text_message
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, inference, loading
from lazyformer_fairseq.evaluation.metrics import count_tags
from lazyformer_fairseq.finetuning.settings import PredictSettings
from lazyformer_fairseq.finetuning.tasks.custom import columns_of
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.atomic import atomic_file
from lazyformer_fairseq.training.objectives.labelled_texts import LabelledTextsObjective
from lazyformer_fairseq.training.objectives.tags import TagsObjective

TABLES = (".tsv", ".csv", ".jsonl")
ROWS_AT_ONCE = 2_000  # kept in memory and batched by similar length


def predict_texts(model: Path, texts: Path, output: Optional[Path], wanted: PredictSettings) -> list[str]:
    """Label the rows of a file, and write them atomically to a new file with the predictions appended.

    Rows without text are also written, with an empty prediction.

    Args:
        model: a checkpoint, its folder, or a folder written by ``lazyformer export``.
        texts: file whose rows contain one or two texts; if it has a label column, the predictions are scored against
            it.
        output: the file to write; its extension selects the format. The default is ``TEXTS.predictions`` with the
            extension of `texts`.
        wanted: the command's options.

    Returns:
        The lines that the command prints.

    Raises:
        UserError: the model has no head for classification, regression or tagging, a row is invalid (the message names
            file and line), or `output` already exists.
    """
    checkpoint = checkpoint_at(model)
    tokenizer = loading.load_tokenizer_beside(checkpoint, wanted.tokenizer)
    loaded = loading.load_state(checkpoints.load(checkpoint), checkpoint, tokenizer)
    head = loaded.choose_head(wanted.head)
    task = loaded.tasks[head]

    endings = TABLES
    ending = ".tsv"
    if task.tags_words:
        endings = (*TABLES, CONLL)
        ending = CONLL
    if texts.suffix.lower() in TABLES:
        ending = texts.suffix
    output = output or texts.with_name(f"{texts.stem}.predictions{ending}")
    if output.exists():
        raise UserError(f"{output} already exists; remove it or use a different --output")
    if output.suffix.lower() not in endings:
        raise UserError(f"--output {output}: the file name must end in {', '.join(endings)}")
    if output.suffix.lower() == ".tsv" and texts.suffix.lower() != ".tsv":
        refuse_tabs(texts)

    loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    shown = {"desc": texts.name, "unit": "B", "unit_scale": True, "delay": 2, "disable": None, "leave": False}
    with Progress(total=texts.stat().st_size, **shown) as progress, atomic_file(output) as file:
        reader, names, rows = open_rows(texts, task, wanted.text, progress.update)
        if output.suffix.lower() == ".jsonl":
            refuse_duplicates(texts, names)
        lines: TableLines | ConllFormatter
        if output.suffix.lower() != CONLL:
            lines = TableLines(output, names, task)
        elif texts.suffix.lower() != CONLL:
            lines = ConllFormatter(reader)
        else:
            lines = ConllCopyFormatter(reader)

        file.write(lines.header().encode())
        tally = Tally(task, reader, loaded.longest_of(head))
        while chunk := list(islice(rows, ROWS_AT_ONCE)):
            answers = loaded.predict_rows(map(reader.texts_of, chunk), head, wanted.max_tokens)
            for row, answer in zip(chunk, answers, strict=True):
                tally.add(row, answer)
                file.write(lines.row(row, answer).encode())
        file.write(lines.rest().encode())
        if tally.rows == tally.without_text.count:
            raise UserError(f"{texts} contains no text{tally.fields_in_place()}")
    return [f"{output}: {tally.rows:,} rows", *tally.lines()]


def fields_added(answer: inference.Prediction, task: TaskDescription) -> dict[str, Any]:
    """Return the fields to append to a row; their values are None if the row has no text."""
    if answer.label is None:
        return dict.fromkeys(added_to(task))
    if task.tags_words:
        return {"prediction": answer.label}
    if task.is_regression:
        # Nine digits distinguish any two fp32 numbers, so predictions that differ stay different in the file.
        return {"prediction": float(f"{answer.label:.9g}")}
    if task.is_multi_label:
        shares = {label: round(share, 4) for label, share in answer.probabilities.items()}
        return {"prediction": answer.label, "probabilities": shares}
    return {"prediction": answer.label, "probability": round(answer.probability, 4)}


def added_to(task: TaskDescription) -> tuple[str, ...]:
    """Return the names of the fields appended to each row."""
    if task.is_regression or task.tags_words:
        return ("prediction",)
    if task.is_multi_label:
        return ("prediction", "probabilities")
    return ("prediction", "probability")


def open_rows(
    path: Path,
    task: TaskDescription,
    text: Sequence[str],
    seen: Callable[[int], Any],
) -> tuple[RowReader, Sequence[str], Iterator[FileRow]]:
    """Open a file of texts, and return a reader for its rows, its column names, and an iterator over its rows.

    Args:
        path: the file.
        task: the task of the model's head.
        text: names of the text columns. The default is the columns used for training if the file has them, or else the
            columns with the usual names.
        seen: progress callback, which receives the number of bytes read since its last call.
    """
    rows = read_rows(path, seen)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path} is empty; write a line that names the columns, followed by one text per line")
    header = first.fields
    layout = task.splits.get("valid")
    trained: tuple[str, ...] = ()
    label = None
    if layout is not None and set(layout.texts) <= set(header):
        trained = layout.texts
    if layout is not None and layout.label in header:
        label = layout.label
    templates: tuple[str, ...] = ()
    if trained and not text:
        templates = layout.templates
    if templates:
        texts = trained
    else:
        texts, label = columns_of(path, header, text or trained, label, is_labelled=False)
    if task.splits and len(templates or texts) != 1 + task.is_pair:
        if task.is_pair:
            knows = "pairs; name two columns, as in --text text,text2"
        else:
            knows = "single texts; name one column with --text"
        raise UserError(f"{path}: the model was trained on {task.name}, which consists of {knows}")
    reader = RowReader.of(path, header, texts, label, templates)
    if path.suffix.lower() != ".jsonl":  # in JSON lines, each row is checked separately
        check_field_names(path, first.line, header, task)
    return reader, header, _rows(reader, rows, task)


def _rows(reader: RowReader, rows: Iterator[FileRow], task: TaskDescription) -> Iterator[FileRow]:
    for row in rows:
        if row.fields == [""] and len(reader.names) > 1:
            continue
        check_field_names(reader.path, row.line, row.whole or (), task)
        yield row


def refuse_tabs(texts: Path) -> None:
    """Raise a UserError if a field contains a tab or a line break, which a TSV file cannot represent."""
    for row in read_rows(texts):
        for separator in ("\t", "\r", "\n"):
            if any(separator in field for field in row.fields):
                raise UserError(
                    f"{texts}, line {row.line}: a field contains {separator!r}, which a .tsv file cannot represent; "
                    "use an --output that ends in .csv or .jsonl"
                )


def refuse_duplicates(path: Path, names: Sequence[str]) -> None:
    """Raise a UserError if two columns have the same name, because JSON lines would drop one of them."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"{path}, line 1: {len(twice)} columns are named {twice[0]!r}, but the fields of a JSON object must have "
            "different names; rename the columns, or use an --output that ends in .tsv or .csv"
        )


def check_field_names(path: Path, line: int, names: Iterable[str], task: TaskDescription) -> None:
    """Raise a UserError if an input field has the same name as an appended field."""
    if taken := [name for name in added_to(task) if name in names]:
        raise UserError(
            f"{path}, line {line}: the field name {taken[0]!r} is reserved for predictions; rename this field"
        )


class TableLines:
    """A formatter for tables: a header line, then rows with their predictions.

    Args:
        output: the file to write; its extension selects the format.
        names: column names of the input file.
        task: the task that the model predicts.
    """

    def __init__(self, output: Path, names: Sequence[str], task: TaskDescription):
        self.output = output
        self.names = names
        self.task = task

    def header(self) -> str:
        """Return the header line, or an empty string for JSON lines."""
        if self.output.suffix.lower() == ".jsonl":
            return ""
        row = FileRow(1, list(self.names))
        titles = {name: name for name in added_to(self.task)}
        return line_of(self.output, self.names, row, titles)

    def row(self, row: FileRow, answer: inference.Prediction) -> str:
        """Return the line for a row."""
        return line_of(self.output, self.names, row, fields_added(answer, self.task))

    def rest(self) -> str:
        """Return the text after the last row."""
        return ""


class ConllFormatter:
    """A formatter for CoNLL files: one word and its tag per line, and an empty line after each text.

    Args:
        reader: the reader of the input rows.
    """

    def __init__(self, reader: RowReader):
        self.reader = reader

    def header(self) -> str:
        """Return the text before the first row."""
        return ""

    def row(self, row: FileRow, answer: inference.Prediction) -> str:
        """Return the lines for a text."""
        words, tags = self.words_and_tags(row, answer)
        lines = [f"{word}\t{tag}\n" for word, tag in zip(words, tags, strict=True)]
        return "".join([*lines, "\n"])

    def rest(self) -> str:
        """Return the text after the last row."""
        return ""

    def words_and_tags(self, row: FileRow, answer: inference.Prediction) -> tuple[list[str], list[str]]:
        """Return a row's words and their tags."""
        words = words_of(self.reader.texts_of(row)[0])
        return words, answer.label or [OUTSIDE] * len(words)  # an empty text has no prediction


class ConllCopyFormatter(ConllFormatter):
    """A formatter that copies an existing CoNLL file, with the predicted tag appended to each word's line."""

    def __init__(self, reader: RowReader):
        super().__init__(reader)
        self._lines = read_lines(reader.path)
        self._copied = 0

    def row(self, row: FileRow, answer: inference.Prediction) -> str:
        """Return the lines between the previous sentence and this one, followed by this one's lines, one per word."""
        _, tags = self.words_and_tags(row, answer)
        between = islice(self._lines, row.line - 1 - self._copied)
        written = [line_without_word(line) for _, line in between]
        word_lines = [line for _, line in islice(self._lines, len(tags))]
        written += [with_column(line, tag) for line, tag in zip(word_lines, tags, strict=True)]
        self._copied = row.line - 1 + len(tags)
        return "".join(written)

    def rest(self) -> str:
        """Return the lines after the last sentence."""
        return "".join(line_without_word(line) for _, line in self._lines)


def line_without_word(line: str) -> str:
    """Format a line without a word, either empty or a document marker; a multi-column marker gets one more column."""
    if len(words_of(line)) > 1:
        return with_column(line, OUTSIDE)
    return f"{line}\n"


def with_column(line: str, value: str) -> str:
    """Append a column to a line, after a space if spaces separate the existing columns, else after a tab."""
    line = line.rstrip(" \t")
    divider = "\t"
    if " " in line and "\t" not in line:
        divider = " "
    return f"{line}{divider}{value}\n"


def line_of(path: Path, names: Sequence[str], row: FileRow, answer: Mapping[str, Any]) -> str:
    """Format a row and its prediction according to the file's extension; JSON objects keep all their fields."""
    if path.suffix.lower() == ".jsonl":
        if row.whole is None:
            own = dict(zip(names, row.fields, strict=True))
        else:
            own = row.whole
        return f"{json.dumps({**own, **answer}, ensure_ascii=False)}\n"
    fields = list(row.fields)
    for value in answer.values():
        if isinstance(value, (list, dict)):
            fields.append(json.dumps(value, ensure_ascii=False))
        else:
            fields.append("" if value is None else value)
    if path.suffix.lower() == ".csv":
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(fields)
        return line.getvalue()
    return "\t".join(map(str, fields)) + "\n"


@dataclass
class CountedRows:
    """The number of rows that share a property, and the line number of the first one."""

    count: int = 0
    first_line: int = 0

    def add(self, row: FileRow) -> None:
        """Count a row."""
        self.count += 1
        self.first_line = self.first_line or row.line


class Tally:
    """Statistics of the predicted rows: rows without text, truncated rows, and scores if the rows have labels.

    Args:
        task: the task that the model predicts.
        reader: the reader of the rows.
        longest: the model's maximum input length in tokens.
    """

    def __init__(self, task: TaskDescription, reader: RowReader, longest: int):
        self.task = task
        self.reader = reader
        self.longest = longest
        self.rows = 0
        self.without_text = CountedRows()
        self.unknown = CountedRows()
        self.cut = CountedRows()
        self.words = 0
        self.cut_words = 0
        self.own_tags: set[str] = set()
        self.fields_instead: dict[str, None] = {}  # fields of rows without the text field
        # Predictions and targets, alternating. A label list has one number per label, and tags are stored as counts.
        self.pairs = array("d")
        self.why_not = ""

    def add(self, row: FileRow, answer: inference.Prediction) -> None:
        """Count a row and its prediction."""
        self.rows += 1
        if answer.is_cut:
            self.cut.add(row)
        if answer.is_unknown:
            self.unknown.add(row)
        if self.task.tags_words:
            self.words += len(answer.label or ())
            self.cut_words += answer.cut_words
        if answer.label is None:
            self.without_text.add(row)
            if row.whole is not None and not set(self._text_columns) <= set(row.whole):
                self.fields_instead.update(dict.fromkeys(islice(row.whole, MOST_SHOWN)))
        elif not self.why_not:
            self._mark(row, answer)

    def _mark(self, row: FileRow, answer: inference.Prediction) -> None:
        try:
            label = self.reader.label_of(row)
            if not label or not label.strip():
                return
            target = target_of_row(self.task, self.reader.path, row, label)
        except UserError as error:
            self.why_not = f"no scores: {error}"
            return
        if self.task.tags_words:
            tags = [self.task.labels[number] for number in target]
            self.own_tags.update(tags)
            self.pairs.extend(count_tags(answer.label, tags))
        else:
            prediction = self.task.target_of(answer.label)
            self.pairs.extend(np.hstack([prediction, target]))

    @property
    def _text_columns(self) -> list[str]:
        return [self.reader.names[place] for place in self.reader.texts]

    def fields_in_place(self) -> str:
        """Return the end of a message about rows without text, which lists the fields that these rows have instead."""
        others = [repr(name[:40]) for name in self.fields_instead if name not in self._text_columns]
        if not others:
            return ""
        wanted = " and ".join(map(repr, self._text_columns))
        return f"; some rows lack {wanted} but have {', '.join(others[:MOST_SHOWN])}; is a name misspelled?"

    def lines(self) -> list[str]:
        """Return a summary of the rows for the user, one sentence per item."""
        said = []
        if count := self.without_text.count:
            have = "have"
            if count == 1:
                have = "has"
            said.append(
                f"{count:,} of {self.rows:,} rows {have} no text and received no prediction; the first is in line "
                f"{self.without_text.first_line}{self.fields_in_place()}"
            )
        if self.unknown.count:
            said.append(unknown_text_message(self.unknown.count, self.rows, self.unknown.first_line))
        if self.cut.count:
            cut = truncation_message(self.cut.count, self.rows, self.longest, "rows")
            said.append(f"{cut}; the first is in line {self.cut.first_line}")
        if self.cut_words:
            said.append(
                f"{self.cut_words:,} of {self.words:,} words were not part of the model's input, and received "
                f"the tag {OUTSIDE}"
            )
        return [*said, *self._marks()]

    def _marks(self) -> list[str]:
        if self.why_not:
            return [self.why_not]
        if not self.pairs or not self.task.metrics:
            return []
        if self.task.tags_words:
            rows = np.array(self.pairs).reshape(-1, 5)
            marks = [f"{name} {100 * TagsObjective.metric(name, rows):.2f}" for name in self.task.metrics]
            said = [f"scores against the file's tags in {len(rows):,} of the rows: {', '.join(marks)}"]
            if len(self.own_tags) == 1:
                said.append(f"all tags in the file are {min(self.own_tags)!r}, so these scores are meaningless")
            return said
        width = 1
        if self.task.is_multi_label:
            width = len(self.task.labels)
        rows = np.array(self.pairs).reshape(-1, 2 * width)
        predictions, targets = np.hsplit(rows, 2)
        marks = [f"{name} {100 * LabelledTextsObjective.metric(name, rows):.2f}" for name in self.task.metrics]
        if self.task.is_regression:
            marks.append(f"mean absolute error {np.abs(predictions - targets).mean():.4g}")
        if len(targets) < self.rows:
            some = f" in {len(targets):,} of the rows"
        else:
            some = ""
        said = [f"scores against the file's labels{some}: {', '.join(marks)}"]
        if len(np.unique(targets, axis=0)) == 1:
            target = targets[0]
            if width == 1:
                target = target.item()
            label = self.task.word_of(target)
            said.append(f"all labels in the file are {label!r}, so these scores are meaningless")
        return said
