"""``report.html``: a corpus's manifest for readers, on one page that loads nothing and runs nothing.

``report.html.jinja`` has its words and its looks. jinja2 escapes all that it writes, for a corpus may hold anything.
"""

import difflib
import math
import re
import unicodedata
from collections import defaultdict
from itertools import accumulate, pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Optional, Union

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

MOST_INPUTS = 40  # rows; more files than that are grouped by folder
EXAMPLE_CHARACTERS = 600
PIECES = re.compile(r"\w+|\s+|.", re.DOTALL)
MARK = Markup('<mark class="{}">{}</mark>')
TICKS = (1, 2, 5)  # of a power of ten; where several powers are shown, the first alone
Manifest = dict[str, Any]


def write_report(manifest: Manifest, path: Path) -> None:
    """Writes the page; the same manifest gives the same bytes."""
    template = _environment().get_template("report.html.jinja")
    page = template.render(
        **manifest,
        groups=grouped(manifest["inputs"]) if len(manifest["inputs"]) > MOST_INPUTS else None,
        reasons=_reasons(manifest),
        histograms={
            name: histogram(lengths["edges"], lengths["counts"]) for name, lengths in manifest["lengths"].items()
        },
        marked={
            step: [marked(before, after) for before, after in pairs]
            for step, pairs in manifest["examples"].items()
            if pairs
        },
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


def grouped(inputs: list[dict[str, Any]]) -> list[tuple[Union[str, int], ...]]:
    """(folder, format, files, bytes, documents), the largest first; those over the limit share one row."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for file in inputs:
        sums = groups[str(PurePosixPath(file["path"]).parent), file["format"]]
        for place, value in enumerate((1, file["bytes"], file.get("documents", 0))):
            sums[place] += value
    ordered = sorted(groups.items(), key=lambda item: (-item[1][1], item[0]))
    rows = [(*key, *sums) for key, sums in ordered[:MOST_INPUTS]]
    if rest := [sums for _, sums in ordered[MOST_INPUTS:]]:
        rows.append((f"and {plural(len(rest), 'more folder')}", "", *map(sum, zip(*rest, strict=True))))
    return rows


def _reasons(manifest: Manifest) -> list[tuple[str, Optional[int], list[str]]]:
    """(reason, documents, names of the first), the most frequent on top; last those of whole files, say."""
    dropped, names = manifest["documents"]["dropped"], manifest["dropped_names"]
    ordered = sorted((reason for reason, n in dropped.items() if n), key=lambda reason: (-dropped[reason], reason))
    others = sorted(reason for reason in names if reason not in ordered)
    return [(reason, dropped.get(reason), names.get(reason, [])) for reason in (*ordered, *others)]


def histogram(edges: list[float], counts: list[int]) -> Optional[dict[str, Any]]:
    """Places and sizes of a drawing, as shares of its width and height; the axis of lengths is logarithmic.

    Returns:
        ``bars`` (left, width, height), ``ticks`` and ``median`` (place, length), ``highest`` bar as a share of all per
        doubling of the length; None where nothing was counted.
    """
    full = [place for place, n in enumerate(counts) if n]
    if not full:
        return None
    edges, counts = edges[full[0] : full[-1] + 2], counts[full[0] : full[-1] + 1]

    def place(length: float) -> float:
        return math.log(length / edges[0]) / math.log(edges[-1] / edges[0])

    # Per doubling, because equal bins of a logarithmic axis do not hold equally many whole numbers.
    shares = [
        n / sum(counts) / math.log2(right / left) for n, (left, right) in zip(counts, pairwise(edges), strict=True)
    ]
    powers = range(math.floor(math.log10(edges[0])), math.ceil(math.log10(edges[-1])) + 1)
    ticks = (10**power * step for power in powers for step in (TICKS if len(powers) < 4 else TICKS[:1]))
    middle = median(edges, counts)
    return {
        "bars": [
            (place(left), place(right) - place(left), share / max(shares))
            for share, (left, right) in zip(shares, pairwise(edges), strict=True)
        ],
        "ticks": [(place(tick), tick) for tick in ticks if edges[0] <= tick <= edges[-1]],
        "median": (place(middle), middle),
        "highest": max(shares),
    }


def median(edges: list[float], counts: list[int]) -> float:
    """Median of a histogram with positive edges, as if lengths were spread evenly, by logarithm, within a bin."""
    half = sum(counts) / 2
    place = next(i for i, total in enumerate(accumulate(counts)) if total >= half)
    part = (half - sum(counts[:place])) / counts[place]
    return edges[place] * (edges[place + 1] / edges[place]) ** part


def marked(before: str, after: str) -> tuple[Markup, Markup]:
    """Both texts, with marks on the differences."""
    old, new = (PIECES.findall(side[:EXAMPLE_CHARACTERS]) for side in (before, after))
    left, right = [], []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for pieces, side, name in ((old[a:b], left, "out"), (new[c:d], right, "in")):
            piece = escape(visible("".join(pieces)))
            side.append(
                piece if kind == "equal" or not piece else Markup('<mark class="{}">{}</mark>').format(name, piece)
            )
    left, right = (Markup("<bdi>{}</bdi>").format(Markup("").join(side)) for side in (left, right))
    return left, right


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


def count(value: Optional[int]) -> str:
    return "–" if value is None else f"{value:,}"


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
