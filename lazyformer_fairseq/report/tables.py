"""Tables for the screen and for Markdown pages."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate


@dataclass(frozen=True)
class Table:
    """A table of cells, which are printed as they are.

    Args:
        title: the heading above the table; empty for none.
        rows: the cells of each row by header. There must be at least one row, and all need the same headers in order.
        left: the headers of columns that are aligned to the left, in addition to the first one.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    left: Collection[str] = ()

    def printed(self, style: str = "github") -> str:
        """Return the table as text in a format of tabulate, such as `github` or, for the screen, `simple`."""
        first = next(iter(self.rows[0]))
        align = ["left" if header in (first, *self.left) else "right" for header in self.rows[0]]
        return tabulate(self.rows, "keys", tablefmt=style, disable_numparse=True, colalign=align)


def markdown_table(rows: Sequence[Mapping[str, Any]], left: Collection[str] = ()) -> str:
    """Return a table without a title in Markdown; the arguments are those of :class:`Table`."""
    return Table("", rows, left).printed()
