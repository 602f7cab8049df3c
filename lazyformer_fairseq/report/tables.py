"""Tables for the terminal and for Markdown pages."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate


@dataclass(frozen=True)
class Table:
    """A table; its cells are printed unchanged.

    Args:
        title: the heading above the table; empty for none.
        rows: each row's cells by header. There must be at least one row, and all rows must have the same headers in the
            same order.
        left: the headers of left-aligned columns, in addition to the first column.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    left: Collection[str] = ()

    def printed(self, style: str = "github") -> str:
        """Format the table in one of tabulate's formats, such as `github` or, for the terminal, `simple`."""
        first = next(iter(self.rows[0]))
        left = (first, *self.left)
        align = ["left" if header in left else "right" for header in self.rows[0]]
        return tabulate(self.rows, "keys", tablefmt=style, disable_numparse=True, colalign=align)


def markdown_table(rows: Sequence[Mapping[str, Any]], left: Collection[str] = ()) -> str:
    """Format a table without a title as Markdown; for the arguments see :class:`Table`."""
    return Table("", rows, left).printed()
