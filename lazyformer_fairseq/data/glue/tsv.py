"""Reads a task's file in the official layout, and names file and line of whatever is wrong with it.

A quotation mark is a character like any other (QUOTE_NONE): texts hold unpaired ones. So a line divided at its tabs is
the row; only a line feed ends it, for texts hold other characters that Unicode calls line ends.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
    """What a file holds: examples in its order, and the lines of :data:`ODDITIES`."""

    path: Path
    examples: list[Example]
    short_lines: list[int]
    mended_lines: list[int] = field(default_factory=list)
    empty_lines: list[int] = field(default_factory=list)

    def oddities(self) -> list[str]:
        """A sentence for the user on each kind of odd row."""
        return describe_oddities(self.path, {name: getattr(self, name) for name in ODDITIES})


ODDITIES = {
    "short_lines": "with too few fields left out",
    "mended_lines": "with a tab in the sentence or at the end, mended",
    "empty_lines": "with an empty sentence, kept",
}


def describe_oddities(file: Union[str, Path], lines: Mapping[str, list[int]]) -> list[str]:
    """:meth:`SplitFile.oddities` of the lines of each kind, as a manifest has them."""
    found = [(what, lines[name]) for name, what in ODDITIES.items() if lines.get(name)]
    return [
        f"{file}: {len(numbers):,} row{'s' * (len(numbers) != 1)} {what} (line {', '.join(map(str, numbers[:5]))}"
        f"{', ...' * (len(numbers) > 5)})"
        for what, numbers in found
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
        columns, width = _find_columns(path, layout, header=first[1]), len(first[1])
    else:
        columns, width = [*layout.texts, layout.label], 1 + max(*layout.texts, layout.label)
        rows = itertools.chain([first], rows)
    file = _read_rows(task, path, rows, columns, width)
    if not file.examples:
        raise UserError(f"{path}: has no row of data; download the task's data again")
    return file


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


def _read_rows(
    task: TaskDescription, path: Path, rows: Iterator[tuple[int, list[str]]], columns: list[Optional[int]], width: int
) -> SplitFile:
    *text_columns, label_column = columns
    file = SplitFile(path, [], [])
    for number, fields in rows:
        if len(fields) > width and (mended := _mend(fields, width, text_columns)):
            file.mended_lines.append(number)
            fields = mended
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


def _mend(fields: list[str], width: int, text_columns: list[int]) -> Optional[list[str]]:
    """A row with too many fields, where it is certain how it is meant; None where it is not."""
    if not any(fields[width:]):
        return fields[:width]
    if len(text_columns) > 1:
        return None
    start, end = text_columns[0], text_columns[0] + 1 + len(fields) - width  # no other column holds words
    return [*fields[:start], " ".join(fields[start:end]), *fields[end:]]


def _list(columns: list[Column]) -> str:
    return ", ".join(repr(column) for column in columns)
