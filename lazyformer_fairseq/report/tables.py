"""Tables for readers, on the screen, in Markdown and in LaTeX, and for programs, in CSV."""

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from lazyformer_fairseq.storage.atomic import write_text


@dataclass(frozen=True)
class Table:
    """Cells as they are printed, by header.

    Args:
        title: above it.
        rows: mappings with the same headers in the same order, at least one.
        left: headers, beside the first, whose columns hold words and are aligned to the left.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    left: Collection[str] = ()

    def printed(self, style: str = "github") -> str:
        """Return the table in a format of tabulate's: `github`, `simple` (for a screen), `latex_booktabs`."""
        first = next(iter(self.rows[0]))
        align = ["left" if header in (first, *self.left) else "right" for header in self.rows[0]]
        return tabulate(self.rows, "keys", tablefmt=style, disable_numparse=True, colalign=align)


def markdown_table(rows: Sequence[Mapping[str, Any]], left: Collection[str] = ()) -> str:
    """Return a table without a title, in Markdown; the arguments are those of :class:`Table`."""
    return Table("", rows, left).printed()


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows of values by column; a column that a row lacks stays empty there."""
    columns = dict.fromkeys(column for row in rows for column in row)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
