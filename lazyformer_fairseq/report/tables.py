"""Tables for readers, on the screen and in Markdown."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate


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
        """Return the table in a format of tabulate's: `github`, `simple` (for a screen)."""
        first = next(iter(self.rows[0]))
        align = ["left" if header in (first, *self.left) else "right" for header in self.rows[0]]
        return tabulate(self.rows, "keys", tablefmt=style, disable_numparse=True, colalign=align)


def markdown_table(rows: Sequence[Mapping[str, Any]], left: Collection[str] = ()) -> str:
    """Return a table without a title, in Markdown; the arguments are those of :class:`Table`."""
    return Table("", rows, left).printed()
