"""Reads a task's file in the official layout, and names file and line of whatever is wrong with it.

A quotation mark is a character like any other (QUOTE_NONE): texts hold unpaired ones. So a line divided at its tabs is
the row; only a line feed ends it, for texts hold other characters that Unicode calls line ends.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Union

from lazyformer_fairseq.data.glue.task_table import Column, Split, TaskDescription
from lazyformer_fairseq.errors import UserError


@dataclass(frozen=True)
class Example:
    """One row: one text or two, the class or score (None where the file has none), and the line, from 1."""

    texts: tuple[str, ...]
    target: Optional[Union[int, float]]
    line: int


@dataclass(frozen=True)
class SplitFile:
    """What a file holds: examples in its order, and the lines with too few fields that were skipped."""

    path: Path
    examples: list[Example]
    short_lines: list[int]


def read_split(task: TaskDescription, folder: Union[str, Path], split: str) -> SplitFile:
    """Reads a split of a task.

    Args:
        folder: where the task's files lie.
        split: a name in `task.splits`.

    Raises:
        UserError: no such split, file, column, label or score; a row with too few fields; text that is not UTF-8.
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
        columns = _find_columns(path, layout, header=first[1])
    else:
        columns = [*layout.texts, layout.label]
        rows = itertools.chain([first], rows)
    examples, short_lines = _examples(task, path, rows, columns)
    if not examples:
        raise UserError(f"{path}: has no row of data; download the task's data again")
    return SplitFile(path, examples, short_lines)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line numbers from 1 and fields; drops a byte order mark (MRPC has one) and a line's final carriage return."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                try:
                    text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path}, line {number}: not UTF-8 text ({error.reason} at byte {error.start}); "
                        "convert the file to UTF-8"
                    ) from None
                yield number, text.split("\t")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is {path.parent} the task's folder?") from None


def _find_columns(path: Path, layout: Split, header: list[str]) -> list[Optional[int]]:
    """Numbers of the text columns and, last, of the label's (None where there is none)."""
    wanted = [*layout.texts] if layout.label is None else [*layout.texts, layout.label]
    missing = [name for name in wanted if name not in header]
    if missing:
        raise UserError(
            f"{path}, line 1: the header lacks {_list(missing)}; found {_list(header)}. "
            "Is it the official file of this split, header and all?"
        )
    columns = [header.index(name) for name in wanted]
    return columns if layout.label is not None else [*columns, None]


def _examples(
    task: TaskDescription, path: Path, rows: Iterator[tuple[int, list[str]]], columns: list[Optional[int]]
) -> tuple[list[Example], list[int]]:
    *text_columns, label_column = columns
    needed = 1 + max(column for column in columns if column is not None)
    examples: list[Example] = []
    short_lines: list[int] = []
    for number, fields in rows:
        if len(fields) < needed:
            if not task.skips_short_rows:
                raise UserError(
                    f"{path}, line {number}: found {len(fields)} field{'s' * (len(fields) != 1)}, needed {needed}; "
                    "is the file cut off, or are its columns not divided by tabs?"
                )
            short_lines.append(number)
            continue
        try:
            target = None if label_column is None else task.target(fields[label_column])
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}; download the task's data again, or mend it") from None
        examples.append(Example(tuple(fields[column] for column in text_columns), target, number))
    return examples, short_lines


def _list(columns: list[Column]) -> str:
    return ", ".join(repr(column) for column in columns)
