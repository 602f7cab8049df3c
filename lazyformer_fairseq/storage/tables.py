"""Tables for readers, in Markdown, and for programs, in CSV."""

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from lazyformer_fairseq.storage.atomic import write_text


def markdown_table(rows: Sequence[Mapping[str, Any]], left: Collection[str] = ()) -> str:
    """Rows of cells by header, the same headers in each.

    Args:
        rows: at least one.
        left: further headers, beside the first, whose columns are aligned to the left.
    """
    first = next(iter(rows[0]))
    align = ["left" if header in (first, *left) else "right" for header in rows[0]]
    return tabulate(rows, "keys", tablefmt="github", disable_numparse=True, colalign=align)


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes rows of values by column; a column that a row lacks stays empty there."""
    columns = dict.fromkeys(column for row in rows for column in row)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
