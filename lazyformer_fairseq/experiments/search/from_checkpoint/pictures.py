"""Pictures of a search from a checkpoint: loss against latency, and what each change costs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure

from lazyformer_fairseq.report.figures import COLOURS, write_picture

SCORED, SUMMED, CONTROL = "scored", "summed", "control"  # what a pattern was measured for
LINEAR = 0.05  # bits: from here on axes and colours go by ratios
NUMBERED = 26  # places: of more, cells are too narrow for a number


def draw_losses(result: Mapping[str, Any], path: Path) -> None:
    """Bits above the original against predicted latency: what the search found, all that both sides measured."""
    figure = Figure(figsize=(7, 4.5))
    axis = figure.subplots()
    for by, colour, label in (
        (SCORED, COLOURS[5], "measured for scores"),
        (SUMMED, COLOURS[0], "measured as promising"),
        (CONTROL, "0.7", "random"),
    ):
        rows = [row for row in result["measured"] if row["by"] == by]
        axis.scatter(_percent(rows), [row["above"] for row in rows], s=8, color=colour, label=label, linewidths=0)
    for by, colour, mark, label in (
        ("control", "0.35", "s", "best random pattern of a budget"),
        ("found", COLOURS[1], "o", "found"),
    ):
        rows = sorted((row[by] for row in result["budgets"] if row[by]), key=lambda row: row["predicted_ms"])
        axis.errorbar(
            _percent(rows),
            [row["above"] for row in rows],
            yerr=[row["error"] for row in rows],
            color=colour,
            marker=mark,
            label=label,
        )
    axis.scatter([100], [0], marker="*", s=130, color="black", label="original", zorder=3)
    axis.set_yscale("symlog", linthresh=LINEAR)
    axis.set(xlabel="predicted latency, % of the original's", ylabel="loss before any update, bits above the original")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    write_picture(figure, path)


def _percent(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [100 * row["predicted_share"] for row in rows]


def draw_changes(result: Mapping[str, Any], path: Path) -> None:
    """Places along x, changes as rows, darker where the loss rises more."""
    own = result["original"]["by_place"]
    names = list(dict.fromkeys(_name(each, own) for each in result["changes"]))
    table = np.full((len(names), len(own)), np.nan)
    for each in result["changes"]:
        table[names.index(_name(each, own)), each["place"]] = each["score"]
    figure = Figure(figsize=(max(6.0, 0.5 * len(own) + 3), 0.32 * len(names) + 1.4))
    axis = figure.subplots()
    highest = max(LINEAR, float(np.nanmax(np.abs(table))))
    norm = SymLogNorm(LINEAR, vmin=-highest, vmax=highest)
    image = axis.imshow(table, cmap="RdBu_r", norm=norm, aspect="auto")
    if len(own) <= NUMBERED:
        for row, column in zip(*np.nonzero(~np.isnan(table)), strict=True):
            value = table[row, column]
            colour = "white" if abs(norm(value) - 0.5) > 0.35 else "black"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xticks(range(len(own)), [f"{text[0]}\n{place}" for place, text in enumerate(own)], fontsize=7)
    axis.set_xlabel("sublayer of the original, the lowest first")
    figure.colorbar(image, label="score, bits", pad=0.02)
    write_picture(figure, path)


def _name(change: Mapping[str, Any], own: Sequence[str]) -> str:
    """Of a row: what a sublayer becomes, and from how far below it reads."""
    text = "nothing" if change["becomes"] == "-" else change["becomes"]
    if change["reads"] is None:
        return text
    nearer = sum(own[place][0] == own[change["reads"]][0] for place in range(change["reads"] + 1, change["place"]))
    return text if not nearer else f"{text}, reading {nearer + 1} below"
