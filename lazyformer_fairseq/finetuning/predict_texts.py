"""``lazyformer predict MODEL TEXTS``: what a fine-tuned model says of each row of a file, into a file like it."""

import csv
import io
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.data.labelled_files import FileRow, TaskDescription, check_width, read_rows
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.metrics import METRICS
from lazyformer_fairseq.finetuning.settings import PredictSettings
from lazyformer_fairseq.finetuning.tasks.own import columns_of
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.atomic import atomic_file
from lazyformer_fairseq.trained import checkpoints, hub

ENDINGS = (".tsv", ".csv", ".jsonl", ".txt")
ROWS_AT_ONCE = 2_000  # in memory; batches of like lengths are made of these


class Row(NamedTuple):
    """A row of the file, its texts, and its label if the file has one."""

    own: FileRow
    texts: tuple[str, ...]
    label: Optional[str]


def predict_texts(model: Path, texts: Path, output: Optional[Path], wanted: PredictSettings) -> list[str]:
    """Writes the rows of a file with the model's answer after each, whole or not at all.

    Args:
        model: a checkpoint, the folder of one, or a folder that ``lazyformer export`` wrote.
        texts: rows of one text or two; where a column has labels, the answers are marked by them.
        output: its ending says its format; by default ``TEXTS.predictions`` with the ending of `texts`.

    Returns:
        What the command prints, by line.

    Raises:
        UserError: the model was not fine-tuned on labels or scores; a row is wrong (file and line); `output` exists.
    """
    ending = ".tsv" if texts.suffix.lower() == ".txt" else texts.suffix
    output = output or texts.with_name(f"{texts.stem}.predictions{ending}")
    if output.exists():
        raise UserError(f"{output}: exists already; remove it, or give another --output")
    if output.suffix.lower() not in ENDINGS[:-1]:
        raise UserError(f"--output {output}: name a file that ends in {', '.join(ENDINGS[:-1])}")
    checkpoint = checkpoint_at(model)
    tokenizer = hub.tokenizer_beside(checkpoint, wanted.tokenizer)
    loaded = hub.load_state(checkpoints.load(checkpoint), checkpoint, tokenizer)
    head = loaded.choose_head(wanted.head)
    task, marks = loaded.tasks[head], Marks(loaded.tasks[head], texts)
    added = added_to(task)
    loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    shown = {"desc": texts.name, "unit": "B", "unit_scale": True, "delay": 2, "disable": None, "leave": False}
    with Progress(total=texts.stat().st_size, **shown) as progress, atomic_file(output) as file:
        names, rows = open_rows(texts, task, wanted.text, progress.update)
        if output.suffix.lower() != ".jsonl":
            file.write(line_of(output, names, FileRow(1, names), dict(zip(added, added, strict=True))).encode())
        while chunk := list(islice(rows, ROWS_AT_ONCE)):
            answers = loaded.predict([row.texts for row in chunk], head=head, max_tokens=wanted.max_tokens)
            for row, (label, probability, _) in zip(chunk, answers, strict=True):
                marks.add(row, label)
                # Nine digits tell all floats of 32 bits apart: scores may differ in the last of them alone.
                found = [float(f"{label:.9g}")] if task.is_regression else [label, round(probability, 4)]
                file.write(line_of(output, names, row.own, dict(zip(added, found, strict=True))).encode())
        if not marks.rows:
            raise UserError(f"{texts}: has no text in it")
    return [f"{output}: {marks.rows:,} rows", *marks.lines()]


def added_to(task: TaskDescription) -> tuple[str, ...]:
    """Names of the fields that stand after a row's own."""
    return ("prediction",) if task.is_regression else ("prediction", "probability")


def open_rows(
    path: Path, task: TaskDescription, text: Sequence[str], seen: Callable[[int], Any]
) -> tuple[list[str], Iterator[Row]]:
    """Names of the file's columns, and its rows.

    Args:
        text: columns of the texts; by default as in training, else the usual names.
        seen: is told the bytes that were read.
    """
    rows = read_rows(path, seen)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path}: is empty; write a line that names its columns, and a text in each line under it")
    header, layout = first.fields, task.splits.get("valid")
    trained = layout.texts if layout is not None and set(layout.texts) <= set(header) else ()
    label = layout.label if layout is not None and layout.label in header else None
    texts, label = columns_of(path, header, text or trained, label, is_labelled=False)
    if task.splits and len(texts) != 1 + task.is_pair:
        knows = "pairs: name two columns, as in --text text text2" if task.is_pair else "single texts: name one so"
        raise UserError(f"{path}: the model was trained on {task.name}, on {knows}")
    names = header
    if isinstance(texts[0], int):
        names, rows = [f"column{place}" for place in range(1, len(header) + 1)], chain([first], rows)
    else:
        texts, label = tuple(map(header.index, texts)), None if label is None else header.index(label)
    refuse_taken(path, first.line, names, task)
    return names, _rows(path, rows, texts, label, len(header), task)


def _rows(
    path: Path,
    rows: Iterator[FileRow],
    texts: Sequence[int],
    label: Optional[int],
    width: int,
    task: TaskDescription,
) -> Iterator[Row]:
    for row in rows:
        line, fields, whole = row
        if fields == [""] and width > 1:
            continue
        check_width(path, line, fields, width)
        refuse_taken(path, line, whole or (), task)
        yield Row(row, tuple(fields[column] for column in texts), None if label is None else fields[label])


def refuse_taken(path: Path, line: int, names: Iterable[str], task: TaskDescription) -> None:
    """Raises a UserError where a field is called as one that is added: it would be lost, or be there twice."""
    if taken := [name for name in added_to(task) if name in names]:
        raise UserError(f"{path}, line {line}: has a field {taken[0]!r} already, as the answer's is called; rename it")


def line_of(path: Path, names: Sequence[str], row: FileRow, answer: Mapping[str, Any]) -> str:
    """A row with its answer, in the format of the file's ending; an object stays as it was."""
    if path.suffix.lower() == ".jsonl":
        own = dict(zip(names, row.fields, strict=True)) if row.whole is None else row.whole
        return f"{json.dumps({**own, **answer}, ensure_ascii=False)}\n"
    fields = [*row.fields, *answer.values()]
    if path.suffix.lower() == ".csv":
        csv.writer(line := io.StringIO(), lineterminator="\n").writerow(fields)
        return line.getvalue()
    return "\t".join(re.sub(r"[\t\r\n]", " ", str(field)) for field in fields) + "\n"


class Marks:
    """How many rows there are, and how right the answers are where the file has labels.

    Args:
        path: of the file, for messages.
    """

    def __init__(self, task: TaskDescription, path: Path):
        self.task, self.path, self.rows, self.why_not = task, path, 0, ""
        self.pairs = array("d")  # answer, target, answer, target ...

    def add(self, row: Row, answer: Any) -> None:
        self.rows += 1
        if row.label is None or self.why_not:
            return
        try:
            target = self.task.target(row.label)
            self.pairs.extend((answer if self.task.is_regression else self.task.labels.index(answer), target))
        except UserError as error:
            self.why_not = f"no marks: {self.path}, line {row.own.line}: {error}"

    def lines(self) -> list[str]:
        if self.why_not or not self.pairs or not self.task.metrics:
            return [self.why_not] if self.why_not else []
        predictions, targets = np.array(self.pairs).reshape(-1, 2).T
        said = [f"{name} {100 * METRICS[name](predictions, targets):.2f}" for name in self.task.metrics]
        if self.task.is_regression:
            said.append(f"mean absolute error {np.abs(predictions - targets).mean():.4g}")
        return [f"by the file's own labels: {', '.join(said)}"]
