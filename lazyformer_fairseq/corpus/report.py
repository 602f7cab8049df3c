"""``report.html``: a corpus's manifest for readers, on one page that loads nothing and runs nothing.

``report.html.jinja`` has its words and its looks. jinja2 escapes all that it writes, for a corpus may hold anything.
"""

import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any, Optional, Union

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

MOST_INPUTS = 40  # rows
SHARES = (0.1, 0.5, 0.9, 0.99)
Manifest = dict[str, Any]


def write_report(manifest: Manifest, path: Path) -> None:
    """Writes the page; the same manifest gives the same bytes."""
    template = _environment().get_template("report.html.jinja")
    page = template.render(
        **manifest,
        inputs_with_rows=manifest["inputs"][:MOST_INPUTS],
        rest=rest_of(manifest["inputs"]),
        reasons=_reasons(manifest),
        quantiles=[
            (name, *(quantile(lengths["edges"], lengths["counts"], share) for share in SHARES))
            for name, lengths in manifest["lengths"].items()
        ],
        changed={step: pairs for step, pairs in manifest["examples"].items() if pairs},
        flat_settings=flat(manifest["settings"]),
    )
    path.write_text(page, encoding="utf-8")


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=count, short=short, percent=percent, duration=duration, plural=plural)
    return environment


def rest_of(inputs: list[dict[str, Any]]) -> Optional[tuple[str, int, int]]:
    """(how many, bytes, documents) of the files that get no row of their own, together; None where all have one."""
    rest = inputs[MOST_INPUTS:]
    sums = (sum(file[name] for file in rest) for name in ("bytes", "documents"))
    return (f"and {plural(len(rest), 'more file')}", *sums) if rest else None


def _reasons(manifest: Manifest) -> list[tuple[str, Optional[int], list[str]]]:
    """(reason, documents, names of the first), the most frequent on top; last those of whole files, say."""
    dropped, names = manifest["documents"]["dropped"], manifest["dropped_names"]
    ordered = sorted((reason for reason, n in dropped.items() if n), key=lambda reason: (-dropped[reason], reason))
    others = sorted(reason for reason in names if reason not in ordered)
    return [(reason, dropped.get(reason), names.get(reason, [])) for reason in (*ordered, *others)]


def quantile(edges: list[float], counts: list[int], share: float) -> Optional[float]:
    """The length that this share of a histogram is below, as if lengths were spread evenly, by logarithm, in a bin.

    None where nothing was counted; edges are positive.
    """
    wanted, below = share * sum(counts), 0
    for count, (left, right) in zip(counts, pairwise(edges), strict=True):
        if count and below + count >= wanted:
            return left * (right / left) ** ((wanted - below) / count)
        below += count
    return None


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"text": {"seed": 1}}`` becomes ``{"text.seed": 1}``."""
    result = {}
    for name, value in values.items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        result.update(inner)
    return result


def visible(value: Any) -> Any:
    """Text with invisible characters (control, direction, lone surrogates) as their codes, line ends as ↵."""
    return value if isinstance(value, Markup) else "".join(map(_seen, str(value)))


def _seen(character: str) -> str:
    if character == "\n":
        return " ↵ "
    if unicodedata.category(character)[0] == "C" and character != "\t":
        return f"⟨U+{ord(character):04X}⟩"
    return character


def count(value: Optional[float]) -> str:
    return "–" if value is None else f"{value:,.0f}"


def plural(number: int, noun: str) -> str:
    return f"{count(number)} {noun}{'s' * (number != 1)}"


def short(value: Union[int, float]) -> str:
    """Three digits and a unit: 1,234 or 12.3 M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}" if value < 999.5 * size else f"{value / size:,.0f} {unit}"
    return f"{value:,.0f}"


def percent(share: Optional[float]) -> str:
    """Two significant digits: 12%, 1.2%, 0.012%."""
    return "–" if share is None or share != share else f"{float(f'{100 * share:.2g}'):g}%"


def duration(seconds: float) -> str:
    """In the unit that reads best: 31.4 s, 12 min, 2 h 05 min."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
