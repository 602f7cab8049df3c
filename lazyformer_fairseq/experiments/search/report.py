"""The report of a search: tables and plots of its result."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lazyformer_fairseq.experiments.yardsticks import Yardsticks
from lazyformer_fairseq.patterns.grammar import read_sublayer
from lazyformer_fairseq.report.figures import picture, styles
from lazyformer_fairseq.report.numbers import with_spread
from lazyformer_fairseq.report.page import Block, markdown, write_page
from lazyformer_fairseq.report.tables import Table

FRONTS = ("found", "control", "largest", "ratio")
Result = Mapping[str, Any]


def write_report(result: Result, folder: Path) -> None:
    """Write table.md and a plot: front.png for a front, or probabilities.png for gradient descent."""
    write_page(_page(result), folder, "table")
    if result["trained"]:
        _draw_front(result, folder / "front.png")
    if result["probabilities"]:
        _draw_probabilities(result, folder / "probabilities.png")


def report_of(result: Result) -> str:
    """Return the report as Markdown: the fronts that were found, their costs, and rank correlations."""
    return markdown(_page(result)).rstrip()


def _page(result: Result) -> list[Block]:
    fronts = [result[name] for name in FRONTS if name in result]
    page: list[Block] = [_front_table(result["baseline"], fronts), _costs_table(fronts)]
    correlations = {"Predicted and measured latency": result["latency_correlation"]}
    for updates, found in result["rank_correlations"].items():
        correlations[f"Losses after {int(updates):,} updates and after complete runs"] = found
    for what, found in correlations.items():
        if found:
            page.append(
                f"{what}, over {found['n']} patterns: Spearman's rank correlation is {found['spearman']:.3f}, and "
                f"Kendall's tau is {found['kendall']:.3f}."
            )
    if result["yardsticks"]:
        yardsticks = Yardsticks(**result["yardsticks"])
        page.append(yardsticks.describe("bits"))
        points = [point for front in fronts for point in front["points"] if point["pattern"]]
        losses = {row["pattern"]: row["loss"] for row in (result["baseline"], *points)}
        page.extend(yardsticks.warn(losses))
    return page


def _front_table(baseline: Result, fronts: Sequence[Result]) -> Table:
    """Return a table with the baseline and one row per budget and front, without empty columns."""
    rows = [_row("baseline", baseline, baseline)]
    for points in zip(*(front["points"] for front in fronts), strict=True):
        rows += [_row(front["method"], point, baseline) for front, point in zip(fronts, points, strict=True)]
    headers = [header for header in rows[0] if any(row[header] for row in rows)]
    shown = [{header: row[header] for header in headers} for row in rows]
    return Table("", shown, left=("pattern",))


def _row(name: str, point: Result, baseline: Result) -> dict[str, str]:
    row = {
        "": name,
        "budget": "",
        "pattern": "none found",
        "parameters": "",
        "predicted, ms": "",
        "measured, ms (quartiles)": "",
        "of the baseline": "",
        "loss, bits": "",
    }
    if point.get("budget") is not None:
        row["budget"] = f"{point['budget']:.0%}"
    if point["pattern"] is not None:
        row["pattern"] = f"`{point['pattern']}`"
        row["predicted, ms"] = f"{point['predicted']:.2f}"
        row["measured, ms (quartiles)"] = with_spread(point["measured"], 2)
        row["of the baseline"] = f"{point['measured']['median'] / baseline['measured']['median']:.0%}"
    if "parameters" in point:
        row["parameters"] = f"{point['parameters']:,}"
        row["loss, bits"] = f"{point['loss']:.3f}"
    return row


def _costs_table(fronts: Sequence[Result]) -> Table:
    """Return a table of each front's cost, which includes the number of baseline updates with the same FLOPs."""
    rows = []
    for front in fronts:
        row = {"": front["method"]}
        for name, number in front["cost"].items():
            if name == "counted":
                header = "in baseline updates"
            else:
                header = name.replace("_", " ")
            row[header] = f"{number:,.0f}"
        rows.append(row)
    return Table("", rows)


def _draw_probabilities(result: Result, path: Path) -> None:
    """Plot the probability of each candidate (rows) in each layer (columns), as in Figure 2 of PAR Transformer."""
    sublayers = map(read_sublayer, result["settings"]["candidates"])
    labels = [each.kind.name + each.text[1:] for each in sublayers]  # the kind's name, followed by any settings
    (rows,) = result["probabilities"]
    table = np.asarray(rows).T
    layers = table.shape[1]
    most_probable = table.argmax(axis=0)
    panel = (max(5.0, 0.32 * layers + 2.5), 0.5 * len(labels) + 1.4)
    with picture(path, panel=panel) as ((axis,),):
        axis.grid(False)
        image = axis.imshow(table, cmap="viridis", aspect="auto")  # colors span the range of the values
        axis.scatter(range(layers), most_probable, s=14, color="white", edgecolors="black", linewidths=0.6)
        axis.set_yticks(range(len(labels)), labels)
        axis.set_xticks(range(layers), range(1, layers + 1), fontsize=7)
        axis.set_xlabel("layer, from the lowest")
        axis.figure.colorbar(image, label="probability", pad=0.02)


def _draw_front(result: Result, path: Path) -> None:
    """Plot loss against predicted latency. A line per pattern connects its rungs; large markers show the fronts."""
    lengths = result["settings"]["lengths"]
    shades = np.linspace(0.75, 0.4, len(lengths))
    with picture(path, panel=(7.5, 5)) as ((axis,),):
        for each in result["trained"]:
            losses = [loss for loss in each["losses"] if loss is not None]
            latencies = [each["predicted"]] * len(losses)
            axis.plot(latencies, losses, color="0.85", linewidth=0.8, zorder=1)

        for rung, (updates, shade) in enumerate(zip(lengths, shades, strict=True)):
            made = [each for each in result["trained"] if each["losses"][rung] is not None]
            axis.plot(
                [each["predicted"] for each in made],
                [each["losses"][rung] for each in made],
                marker="o",
                markersize=4,
                linestyle="",
                color=str(shade),
                label=f"after {updates:,} updates",
                zorder=2,
            )

        for name, style in styles(FRONTS).items():
            if name in result:
                points = [point for point in result[name]["points"] if point["pattern"]]
                predicted = [point["predicted"] for point in points]
                losses = [point["loss"] for point in points]
                axis.plot(predicted, losses, label=result[name]["method"], linewidth=1, zorder=3, **style)

        baseline = result["baseline"]
        axis.plot([baseline["predicted"]], [baseline["loss"]], "k*", markersize=13, label="baseline", zorder=4)
        axis.set(xlabel="predicted latency, ms", ylabel="validation loss, bits")
        axis.legend(fontsize=8)
