"""HTML by small functions. Text is escaped unless it is :class:`Html`, for a corpus may hold anything."""

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from typing import Optional, Union

EXAMPLE_CHARACTERS = 600
PIECES = re.compile(r"\w+|\s+|.", re.DOTALL)
STYLE = """
:root { --ink: #1d232a; --soft: #5c6773; --line: #dfe4e9; --blue: #2f6f9f; }
* { box-sizing: border-box; }
html { font-size: 15px; }
body { margin: 0 auto; padding: 2rem 1.5rem 3rem; max-width: 66rem; color: var(--ink); background: #fff;
       font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.2rem 0 .6rem; }
.tile { flex: 1 1 11rem; border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.35rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .82rem; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; }
th { text-align: left; color: var(--soft); font-weight: 600; vertical-align: bottom; }
th, td { padding: .28rem .9rem .28rem 0; border-bottom: 1px solid var(--line); }
td { vertical-align: top; overflow-wrap: break-word; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.example { width: 50%; overflow-wrap: anywhere; padding: .35rem .9rem .35rem 0;
             font: .8rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
mark { border-radius: .2em; padding: 0 .1em; color: inherit; }
mark.out { background: #fbdcd9; } mark.in { background: #d3efd8; }
.bar { display: inline-block; height: .6rem; background: var(--blue); border-radius: .15rem; min-width: 1px; }
.list { margin-right: .9em; }
img { width: 100%; max-width: 62rem; height: auto; display: block; }
@media print { html { font-size: 11px; } body { max-width: none; padding: 0; } h2, h3 { break-after: avoid; }
  tr, .tile, img { break-inside: avoid; } .bar, mark { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


class Html(str):
    """Markup that is safe already."""


def text(value: object) -> Html:
    """Escaped text; invisible characters (control, direction, lone surrogates) as their codes, line ends as ↵."""
    if isinstance(value, Html):
        return value
    return Html(escape("".join(map(_seen, str(value)))))


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], numbers: str = "") -> Html:
    """``numbers``: a letter a column, ``n`` for one of numbers, ``t`` for text, ``e`` for an example."""
    kinds = {"n": ' class="number"', "e": ' class="example"'}
    classes = [kinds.get(kind, "") for kind in numbers.ljust(len(headers), "t")]

    def row(tag: str, cells: Sequence[object]) -> str:
        inner = (f"<{tag}{kind}>{text(cell)}</{tag}>" for kind, cell in zip(classes, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    body = "\n".join(row("td", cells) for cells in rows)
    return Html(f"<table><thead>{row('th', headers)}</thead><tbody>\n{body}\n</tbody></table>")


def marked(before: str, after: str) -> tuple[Html, Html]:
    """Both texts, with marks on the differences."""
    old, new = (PIECES.findall(side[:EXAMPLE_CHARACTERS]) for side in (before, after))
    left, right = [], []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for pieces, side, name in ((old[a:b], left, "out"), (new[c:d], right, "in")):
            piece = text("".join(pieces))
            side.append(piece if kind == "equal" or not piece else f'<mark class="{name}">{piece}</mark>')
    return Html(f"<bdi>{''.join(left)}</bdi>"), Html(f"<bdi>{''.join(right)}</bdi>")


def bar(share: float) -> Html:
    return Html(f'<span class="bar" style="width: {8 * share:.2f}rem"></span>')


def listing(items: Iterable[object]) -> Html:
    """Several things in a cell, each kept on one line with its number."""
    return Html(" ".join(f'<span class="list">{text(item)}</span>' for item in items))


def count(value: Optional[int]) -> str:
    return "–" if value is None else f"{value:,}"


def short(value: Union[int, float]) -> str:
    """Three digits and a unit: 1,234 or 12.3 M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}" if value < 999.5 * size else f"{value / size:,.0f} {unit}"
    return f"{value:,.0f}"


def size(number_of_bytes: Union[int, float]) -> str:
    """Three digits and a unit: 9.77 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number_of_bytes < 999.5:
            return f"{number_of_bytes:.3g} {unit}"
        number_of_bytes /= 1000
    return f"{number_of_bytes:,.3g} TB"


def percent(share: Optional[float]) -> str:
    """Two significant digits: 12%, 1.2%, 0.012%."""
    return "–" if share is None or share != share else f"{float(f'{100 * share:.2g}'):g}%"


def duration(seconds: float) -> str:
    """In the unit that reads best: 31.4 s, 12 min, 2 h 05 min."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _seen(character: str) -> str:
    if character == "\n":
        return " ↵ "
    if unicodedata.category(character)[0] == "C" and character != "\t":
        return f"⟨U+{ord(character):04X}⟩"
    return character
