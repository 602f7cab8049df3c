"""A front's table and pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any, Optional

from matplotlib.figure import Figure

from lazyformer_fairseq.report.figures import COLOURS, MARKS, write_picture
from lazyformer_fairseq.report.numbers import with_spread
from lazyformer_fairseq.report.tables import markdown_table, write_csv
from lazyformer_fairseq.storage.atomic import write_text

NAMES = ("found", "control")


def write_report(result: Mapping[str, Any], folder: File) -> None:
    """table.md, front.csv, front.png, and latency_check.png where latency was checked."""
    write_text(folder / "table.md", report(result) + "\n")
    write_csv(list(csv_rows(result)), folder / "front.csv")
    draw_front(result, folder / "front.png")
    if result["latency_check"]["patterns"]:
        draw_latency_check(result["latency_check"], folder / "latency_check.png")


def report(result: Mapping[str, Any]) -> str:
    """The front beside its control, what each cost, and how well latency was predicted; in Markdown."""
    parts = [front_table(result), costs_table(result), *_notes(result)]
    return "\n\n".join(parts)


def front_table(result: Mapping[str, Any]) -> str:
    """The baseline, then of each budget a row of the method and one of its control."""
    baseline = result["baseline"]
    rows = [_row("baseline", "", baseline, baseline)]
    for number, point in enumerate(result["found"]["points"]):
        share = f"{point['budget']:.0%}"
        for name in NAMES:
            if name in result:
                of_budget = result[name]["points"][number]
                rows.append(_row(_called(result, name), share, of_budget, baseline))
    return markdown_table(rows, left=("pattern",))


def _called(result: Mapping[str, Any], name: str) -> str:
    return result[name]["method"] + (", the control" if name == "control" else "")


def _row(name: str, budget: str, point: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, str]:
    start = {"": name, "budget": budget}
    if point["pattern"] is None:
        empty = ("predicted, ms", "measured, ms (quartiles)", "of the baseline", "inherited loss, bits")
        return {**start, "pattern": "none found", **dict.fromkeys(empty, "")}
    share = point["measured"]["median"] / baseline["measured"]["median"]
    return {
        **start,
        "pattern": f"`{point['pattern']}`",
        "predicted, ms": f"{point['predicted']:.2f}",
        "measured, ms (quartiles)": with_spread(point["measured"], 2),
        "of the baseline": f"{share:.0%}",
        "inherited loss, bits": "" if point["loss"] is None else f"{point['loss']:.3f}",
    }


def costs_table(result: Mapping[str, Any]) -> str:
    """Updates and evaluations, and both in updates of the baseline, counted by FLOPs and measured."""
    rows = []
    for name in NAMES:
        if name in result:
            cost = result[name]["cost"]
            rows.append(
                {
                    "": _called(result, name),
                    "updates of weights": f"{cost['weights_updates']:,}",
                    "of the architecture": f"{cost['architecture_updates']:,}",
                    "evaluations": f"{cost['evaluations']:,}",
                    "in updates of the baseline: counted": f"{cost['counted']:,.0f}",
                    "measured": f"{cost['measured']:,.0f}",
                    "seconds": f"{cost['seconds']:,.0f}",
                }
            )
    return markdown_table(rows)


def _notes(result: Mapping[str, Any]) -> Sequence[str]:
    found = result["latency_check"]["correlation"]
    if found is None:
        return []
    return [
        f"Predicted with measured latency of {found['n']} patterns spread over the space: Spearman's rank correlation "
        f"{found['spearman']:.3f}, Kendall's tau {found['kendall']:.3f}."
    ]


def csv_rows(result: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """The points of both fronts in full precision."""
    rows = []
    for name in NAMES:
        for point in result.get(name, {}).get("points", ()):
            measured = {
                f"measured_{part}_ms": value for part, value in point.get("measured", {}).items() if part != "n"
            }
            plain = {key: point.get(key) for key in ("budget", "pattern", "by_layer", "loss")}
            of_what = {"front": name, "method": result[name]["method"]}
            rows.append({**of_what, **plain, "predicted_ms": point.get("predicted"), **measured})
    return rows


def draw_front(result: Mapping[str, Any], path: File) -> None:
    """Inherited loss against predicted latency: a small mark is a judged pattern, a large one a point of a front."""
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, colour, mark in zip(NAMES, COLOURS, MARKS, strict=False):
        if name not in result:
            continue
        judged = result[name]["judged"]
        axis.scatter([each["latency"] for each in judged], [each["loss"] for each in judged], s=8, alpha=0.4, c=colour)
        points = [point for point in result[name]["points"] if point["pattern"] is not None]
        lines = ([point["predicted"] for point in points], [point["loss"] for point in points])
        axis.plot(*lines, color=colour, marker=mark, label=_called(result, name))
    baseline = result["baseline"]
    if baseline["loss"] is not None:
        axis.plot([baseline["predicted"]], [baseline["loss"]], "k*", markersize=11, linestyle="", label="baseline")
    axis.set(xlabel="predicted latency, ms", ylabel="loss with inherited weights, bits")
    axis.grid(alpha=0.3)
    axis.legend()
    write_picture(figure, path)


def draw_latency_check(check: Mapping[str, Any], path: File) -> None:
    """Measured against predicted latency; bars are quartiles, the line is where the two are equal."""
    rows = list(check["patterns"].values())
    predicted = [row["predicted"] for row in rows]
    medians = [row["measured"]["median"] for row in rows]
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axis = figure.subplots()
    if all("low" in row["measured"] for row in rows):
        lows, highs = ([row["measured"][part] for row in rows] for part in ("low", "high"))
        axis.vlines(predicted, lows, highs, color=COLOURS[0], alpha=0.6)
    axis.plot(predicted, medians, linestyle="", marker="o", color=COLOURS[0])
    axis.axline((predicted[0], predicted[0]), slope=1, color="0.5", linestyle="--")
    axis.set(
        xlabel="predicted latency, ms", ylabel="measured latency, ms (quartiles)", title=_title(check["correlation"])
    )
    axis.grid(alpha=0.3)
    write_picture(figure, path)


def _title(found: Optional[Mapping[str, float]]) -> str:
    return "" if found is None else f"Spearman {found['spearman']:.3f}, {found['n']} patterns"
