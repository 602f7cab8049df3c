"""Orders as a table, and drawn as Press et al. (2019, section 3) list random models: a strip each, the worst first."""

from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from lazyformer_fairseq.experiments.search.report.found_pattern import compact
from lazyformer_fairseq.patterns.grammar import read_sublayer
from lazyformer_fairseq.report.figures import write_picture
from lazyformer_fairseq.report.tables import markdown_table

TITLES = {"counts": "as many s as f", "parameters": "equal parameters"}


def report(results: Mapping[str, Any]) -> str:
    """A table for each figure, the best last as in the paper, and what random orders say of attention's place."""
    parts = []
    for figure, rows in by_figure(results["rows"]).items():
        parts.append(f"Random orders of {TITLES[figure]}:")
        parts.append(markdown_table([_row(row) for row in rows], left=("order",)))
        found = results["attention_below"][figure]
        if found:
            parts.append(
                f"Of the random ones, the share of `s` in the lower half with the loss: Spearman's rank correlation "
                f"{found['spearman']:.2f}, {found['n']} orders."
            )
    updates, seconds = results["recipe"]["updates"], results["cpu_seconds"]
    parts.append(f"{updates:,} updates each; {seconds:,.0f} seconds of processor time together.")
    return "\n\n".join(parts)


def by_figure(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each figure, the highest loss first."""
    figures = dict.fromkeys(row["figure"] for row in rows)
    return {
        figure: sorted((row for row in rows if row["figure"] == figure), key=lambda row: -row["loss"])
        for figure in figures
    }


def _name(row: Mapping[str, Any]) -> str:
    if row["what"] == "sandwich":
        return f"Sandwich, k = {row['coefficient']}"
    return f"interleaved, seed {row['seed']}" if row["what"] == "interleaved" else "random"


def _row(row: Mapping[str, Any]) -> dict[str, str]:
    is_random = row["what"] == "random"
    loss = f"{row['loss']:.3f}"
    return {
        "": _name(row),
        "order": f"`{compact(row['order'])}`",
        "parameters": f"{row['parameters']:,}",
        "CPU ms per update": f"{row['cpu_ms_per_update']:.0f}",
        "validation loss, bits": loss if is_random else f"**{loss}**",
        "perplexity": f"{2 ** row['loss']:.2f}",
    }


def csv_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """In full precision."""
    return [{**row, "perplexity": 2 ** row["loss"]} for row in rows]


def draw(rows: Sequence[Mapping[str, Any]], path: File) -> None:
    """Of each figure a strip a model, the highest loss on top, losses at its end; what is not random in bold."""
    figures = by_figure(rows)
    longest = max(len(row["order"]) for row in rows)
    most = max(map(len, figures.values()))
    figure = Figure(figsize=(len(figures) * (0.2 * longest + 2.6), 0.2 * most + 1.0), layout="constrained")
    for axis, (name, members) in zip(figure.subplots(1, len(figures), squeeze=False)[0], figures.items(), strict=True):
        axis.imshow(_colours(members, longest), aspect="auto")
        for height, row in enumerate(members):
            weight = "normal" if row["what"] == "random" else "bold"
            axis.text(longest - 0.3, height, f"{row['loss']:.3f}", va="center", fontsize=7, fontweight=weight)
            axis.text(-0.7, height, "" if weight == "normal" else _name(row), va="center", ha="right", fontsize=6)
            for place, letter in enumerate(row["order"]):
                axis.text(place, height, letter, ha="center", va="center", fontsize=6, color="white")
        axis.set_title(f"{TITLES[name]}: validation loss, bits", fontsize=9)
        axis.set_axis_off()
    write_picture(figure, path)


def _colours(rows: Sequence[Mapping[str, Any]], longest: int) -> np.ndarray:
    """(rows, longest, 3): each sublayer in its kind's colour, white behind the last."""
    image = np.ones((len(rows), longest, 3))
    for height, row in enumerate(rows):
        for place, letter in enumerate(row["order"]):
            image[height, place] = to_rgb(read_sublayer(letter).kind.colour)
    return image
