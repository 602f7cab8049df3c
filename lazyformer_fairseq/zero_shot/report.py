"""The report on minimal pairs: a summary, a table by phenomenon, a table by paradigm, and a bar chart."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lazyformer_fairseq.report.figures import COLORS, picture
from lazyformer_fairseq.report.page import Notes, Picture, write_page
from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.zero_shot.pairs import Paradigm, readable
from lazyformer_fairseq.zero_shot.results import NORMAL_95, Answers

BARS = "phenomena.png"
PAGE = "report"
CHANCE = 50  # percent
ALL_OF_BLIMP = (67, 67_000)  # paradigms, pairs


def write_report(answers: Sequence[Answers], paradigms: Sequence[Paradigm], benchmark: str, folder: Path) -> str:
    """Write report.md and phenomena.png; return the summary and the table by phenomenon, for the terminal."""
    names = [paradigm.name for paradigm in paradigms]
    by_phenomenon = phenomena_of(paradigms)
    draw(answers, by_phenomenon, folder / BARS)
    verdict = " ".join(_verdict(answers, names))
    title = f"Accuracy by phenomenon, % (chance: {CHANCE})"
    table = Table(title, list(_rows(answers, by_phenomenon, names)))
    notes = Notes(list(_notes(answers, paradigms, benchmark)))
    shown = write_page([verdict, table, notes], folder, PAGE)
    rows = [
        {
            "paradigm": readable(paradigm.name),
            "phenomenon": readable(paradigm.phenomenon),
            "pairs": f"{len(paradigm.pairs):,}",
            **{each.model: f"{100 * each.accuracy(paradigm.name):.1f}" for each in answers},
        }
        for paradigm in paradigms
    ]
    details = Table(f"Accuracy by paradigm, % (chance: {CHANCE})", rows, left=("phenomenon",))
    write_page([verdict, table, notes, Picture(BARS), details], folder, PAGE)
    return shown


def phenomena_of(paradigms: Sequence[Paradigm]) -> dict[str, list[str]]:
    """Group paradigm names by phenomenon, both sorted; a paradigm without a phenomenon is a group by itself."""
    found: dict[str, list[str]] = {}
    for paradigm in paradigms:
        found.setdefault(paradigm.phenomenon or paradigm.name, []).append(paradigm.name)
    return dict(sorted(found.items()))


def _verdict(answers: Sequence[Answers], names: Sequence[str]) -> Iterator[str]:
    """Yield one sentence per model, including its difference from the first model."""
    first = answers[0]
    for each in answers:
        mean = 100 * each.mean_accuracy(names)
        half = 100 * NORMAL_95 * each.standard_error(names)
        sentence = f"{each.model} prefers the good sentence in {mean:.1f}% of the pairs (95% interval ±{half:.1f})"
        if each is not first:
            by, error = each.difference(first, names)
            sentence += f", {abs(100 * by):.1f} points {'above' if by >= 0 else 'below'} {first.model}"
            sentence += f" (±{100 * NORMAL_95 * error:.1f})"
        yield f"{sentence}."


def _rows(
    answers: Sequence[Answers],
    by_phenomenon: dict[str, list[str]],
    names: Sequence[str],
) -> Iterator[dict[str, str]]:
    for phenomenon, paradigms in by_phenomenon.items():
        row = {"phenomenon": readable(phenomenon), "paradigms": str(len(paradigms))}
        for each in answers:
            row[each.model] = f"{100 * each.mean_accuracy(paradigms):.1f}"
        yield row
    row = {"phenomenon": "mean over paradigms", "paradigms": str(len(names))}
    for each in answers:
        half = 100 * NORMAL_95 * each.standard_error(names)
        row[each.model] = f"{100 * each.mean_accuracy(names):.1f} ±{half:.1f}"
    yield row


def _notes(answers: Sequence[Answers], paradigms: Sequence[Paradigm], benchmark: str) -> Iterator[str]:
    pairs = sum(len(paradigm.pairs) for paradigm in paradigms)
    yield (
        f"Pairs: {pairs:,}; paradigms: {len(paradigms)}, equally weighted; ties count as wrong. "
        "The intervals assume that pairs are random samples within paradigms."
    )
    if benchmark == "blimp" and (len(paradigms), pairs) != ALL_OF_BLIMP:
        yield f"This is not all of BLiMP, which has {ALL_OF_BLIMP[0]} paradigms and {ALL_OF_BLIMP[1]:,} pairs."
    for each in answers:
        said = f"{each.model}: {each.method}"
        if each.unknown:
            said += f"; {each.unknown:,} of {each.sentences:,} sentences contain a token unknown to the model"
        if each.cut:
            said += f"; {each.cut:,} sentences exceed the model's maximum length and were truncated"
        yield f"{said}; {each.seconds:,.0f} s on {each.machine['device']}."


def draw(answers: Sequence[Answers], by_phenomenon: dict[str, list[str]], path: Path) -> None:
    """Draw a bar chart of each model's accuracy by phenomenon, with the mean over paradigms at the bottom."""
    groups = {**by_phenomenon, "mean over paradigms": [name for names in by_phenomenon.values() for name in names]}
    height = 0.8 / len(answers)
    places = np.arange(len(groups))
    inches = 1.2 + len(groups) * (0.18 + 0.14 * len(answers))
    with picture(path, panel=(7.5, inches), title="Accuracy on minimal pairs") as axes:
        axis = axes[0, 0]
        for number, each in enumerate(answers):
            offset = height * (number - (len(answers) - 1) / 2)
            values = [100 * each.mean_accuracy(names) for names in groups.values()]
            errors = [100 * NORMAL_95 * each.standard_error(names) for names in groups.values()]
            axis.barh(
                places + offset,
                values,
                height,
                xerr=errors,
                color=COLORS[number % len(COLORS)],
                error_kw={"linewidth": 0.8},
                label=each.model,
            )
        axis.axvline(CHANCE, color="black", linestyle=":", linewidth=1)
        axis.set_yticks(places, [readable(name) for name in groups])
        axis.invert_yaxis()
        axis.set_xlim(0, 100)
        axis.set_xlabel("accuracy, % (dotted: chance)")
        axis.grid(visible=False, axis="y")
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
