"""What a search found, as tables and pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.experiments.search.fairseq_model import FairseqSearch
from lazyformer_fairseq.experiments.search.space import compact
from lazyformer_fairseq.measure.costs.flops import count_flops
from lazyformer_fairseq.measure.costs.latency import Timing
from lazyformer_fairseq.patterns.grammar import count_kinds, read_sublayer, split_sublayers
from lazyformer_fairseq.patterns.kinds import kinds
from lazyformer_fairseq.report.figures import COLOURS, picture, styles
from lazyformer_fairseq.report.numbers import spread, with_spread
from lazyformer_fairseq.report.page import Block, markdown, write_page
from lazyformer_fairseq.report.tables import Table, markdown_table, write_csv

STAGES = {"weights": ("o", "#0072B2", "on the weights' data"), "architecture": ("s", "#D55E00", "on held-apart data")}
LINES = ("--", ":", "-.")  # of one kind with several settings
FRONTS = ("found", "control")


def describe_models(
    search: FairseqSearch, patterns: Mapping[str, str], timings: Mapping[str, Timing]
) -> list[dict[str, Any]]:
    """Sizes and speed of patterns by name, as rows, the baseline first.

    FLOPs and latency are of one forward pass at batch 1 over ``latency_tokens`` and ``latency_memory``.
    """
    lengths = (search.latency_tokens, search.latency_memory)
    # Count an encoder's head for one prediction only: downstream tasks have no masked-LM head.
    predicted = 1 if search.settings.task == "masked-lm" else None
    rows = []
    for name, pattern in patterns.items():
        model, network = search.build_model(pattern)
        seconds = timings[pattern].as_json()
        rows.append(
            {
                "name": name,
                "pattern": compact(pattern),
                "sublayers": count_kinds(pattern),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "flops": count_flops(pattern, network.sizes, *lengths, predicted=predicted),
                "latency_ms": 1000 * seconds["median"],
                "latency_ms_quartiles": [1000 * seconds["low"], 1000 * seconds["high"]],
                "latency_of_baseline": seconds["median"] / timings[patterns["baseline"]].median,
            }
        )
    return rows


def models_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of :func:`describe_models`, in Markdown."""
    lines = []
    for row in rows:
        low, high = row["latency_ms_quartiles"]
        lines.append(
            {
                "": row["name"],
                "pattern": f"`{row['pattern']}`",
                **row["sublayers"],
                "parameters": f"{row['parameters']:,}",
                "GFLOPs": f"{row['flops'] / 1e9:.3g}",
                "latency, ms (quartiles)": with_spread({"median": row["latency_ms"], "low": low, "high": high}, 2),
                "latency": f"{row['latency_of_baseline']:.0%}",
            }
        )
    return markdown_table(lines, left=("pattern",))


def update_cost_table(timings: Mapping[str, Timing], supernets: Sequence[str], architecture_share: float) -> str:
    """Updates beside the baseline's, and of each supernet the mean of an epoch, in Markdown."""
    baseline = timings["baseline"].median
    rows = []
    for name, timing in timings.items():
        milliseconds = with_spread(spread([1000 * sample for sample in timing.samples]))
        rows.append((name, milliseconds, timing.median / baseline))
    for name in supernets:
        weights, architecture = (timings[f"{name}: {kind}"].median for kind in ("weights", "architecture"))
        mean = (1 - architecture_share) * weights + architecture_share * architecture
        rows.append((f"{name}: mean of an epoch with both", f"{1000 * mean:.1f}", mean / baseline))
    return markdown_table([{"update": a, "ms (quartiles)": b, "x baseline": f"{c:.2f}"} for a, b, c in rows])


def write_search(
    result: Mapping[str, Any],
    probabilities: Mapping[str, Any],
    history: Sequence[dict[str, Any]],
    baseline_latency: float,
    folder: Path,
) -> None:
    """table.md, probabilities.png, history.png.

    Args:
        probabilities: `layers` (L rows of K) of the `candidates`.
        baseline_latency: in ms.
    """
    write_page([models_table(result["table"])], folder, "table")
    _draw_probabilities(probabilities["layers"], probabilities["candidates"], folder / "probabilities.png")
    _draw_history(history, baseline_latency, folder / "history.png")


def _draw_probabilities(probabilities: Sequence[Sequence[float]], candidates: Sequence[str], path: Path) -> None:
    """Layers along x, candidates as rows, brighter where more probable (PAR Transformer, Figure 2); dots: choices."""
    table = np.asarray(probabilities).T
    layers = table.shape[1]
    with picture(path, panel=(max(5.0, 0.32 * layers + 2.5), 0.5 * len(candidates) + 1.4)) as ((axis,),):
        axis.grid(False)
        image = axis.imshow(table, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axis.scatter(range(layers), table.argmax(axis=0), s=14, color="white", edgecolors="black", linewidths=0.6)
        axis.set_yticks(range(len(candidates)), [_label(name) for name in candidates])
        axis.set_xticks(range(layers), range(1, layers + 1), fontsize=7)
        axis.set_xlabel("layer, the lowest first")
        axis.figure.colorbar(image, label="probability", pad=0.02)


def _draw_history(history: Sequence[dict[str, Any]], baseline_latency: float, path: Path) -> None:
    """Loss by stage, entropy and temperature, expected latency, and the kinds in the pattern, against updates."""

    def values(name: str) -> list[float]:
        return [row[name] for row in history]

    with picture(path, 2, 2, panel=(5, 3), sharex=True) as ((losses, entropy), (latency, counts)):
        for stage, (mark, colour, label) in STAGES.items():
            rows = [(row["update"], row["loss"]) for row in history if row["stage"] == stage]
            if rows:
                losses.plot(*zip(*rows, strict=True), marker=mark, markersize=3, color=colour, label=label)
        losses.set_ylabel("loss, bits a prediction")
        entropy.plot(values("update"), values("entropy"), color="#0072B2")
        entropy.set_ylabel("entropy, bits a layer", color="#0072B2")
        entropy.set_ylim(0, 1.05 * history[0]["entropy"])
        beside = entropy.twinx()
        beside.plot(values("update"), values("temperature"), color="#E69F00", linestyle="--")
        beside.set_ylabel("temperature", color="#E69F00")
        beside.set_ylim(bottom=0)
        latency.plot(values("update"), values("expected_latency"), color="#009E73", label="expected")
        latency.axhline(baseline_latency, color="0.45", linestyle="--", label="baseline")
        latency.set_ylabel("latency, ms")
        layers = [split_sublayers(row["by_layer"]) for row in history]
        for number, name in enumerate(sorted({name for row in layers for name in row}, key=_place)):
            line = "-" if len(name) == 1 else LINES[number % 3]
            style = {"color": read_sublayer(name).kind.colour, "linestyle": line, "label": _label(name)}
            counts.step(values("update"), [row.count(name) for row in layers], where="post", **style)
        counts.set_ylabel("layers that prefer it")
        for axis in (losses, latency, counts):
            axis.legend(fontsize=8)
        for axis in (latency, counts):
            axis.set(xlabel="updates", ylim=(0, None))


def _label(name: str) -> str:
    """``self-attention``, and its settings if it has any."""
    sublayer = read_sublayer(name)
    return sublayer.kind.name + sublayer.text[1:]


def _place(name: str) -> tuple[int, str]:
    """Sort key: the order of the table of kinds."""
    return kinds().index(read_sublayer(name).kind), name


def write_front(result: Mapping[str, Any], folder: Path) -> None:
    """table.md, front.csv, front.png, and latency_check.png where latency was checked."""
    write_page(_front_page(result), folder, "table")
    write_csv(_csv_rows(result), folder / "front.csv")
    _draw_front(result, folder / "front.png")
    if result["latency_check"]["patterns"]:
        _draw_latency_check(result["latency_check"], folder / "latency_check.png")


def front_report(result: Mapping[str, Any]) -> str:
    """The front beside its control, what each cost, and how well latency was predicted; in Markdown."""
    return markdown(_front_page(result)).rstrip()


def _front_page(result: Mapping[str, Any]) -> list[Block]:
    page: list[Block] = [_front_table(result), _costs_table(result)]
    if found := result["latency_check"]["correlation"]:
        page.append(
            f"Predicted with measured latency of {found['n']} patterns spread over the space: Spearman's rank "
            f"correlation {found['spearman']:.3f}, Kendall's tau {found['kendall']:.3f}."
        )
    return page


def _front_table(result: Mapping[str, Any]) -> Table:
    """The baseline, then of each budget a row of the method and one of its control."""
    baseline = result["baseline"]
    rows = [_row("baseline", "", baseline, baseline)]
    for number, point in enumerate(result["found"]["points"]):
        for name in FRONTS:
            if name in result:
                of_budget = result[name]["points"][number]
                rows.append(_row(_called(result, name), f"{point['budget']:.0%}", of_budget, baseline))
    return Table("", rows, left=("pattern",))


def _called(result: Mapping[str, Any], name: str) -> str:
    return result[name]["method"] + (", the control" if name == "control" else "")


def _row(name: str, budget: str, point: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, str]:
    found = {"predicted, ms": "", "measured, ms (quartiles)": "", "of the baseline": "", "inherited loss, bits": ""}
    if point["pattern"] is not None:
        loss = point["loss"]
        found = {
            "predicted, ms": f"{point['predicted']:.2f}",
            "measured, ms (quartiles)": with_spread(point["measured"], 2),
            "of the baseline": f"{point['measured']['median'] / baseline['measured']['median']:.0%}",
            "inherited loss, bits": "" if loss is None else f"{loss:.3f}",
        }
    pattern = "none found" if point["pattern"] is None else f"`{point['pattern']}`"
    return {"": name, "budget": budget, "pattern": pattern, **found}


def _costs_table(result: Mapping[str, Any]) -> Table:
    """Updates and evaluations, and both in updates of the baseline, counted by FLOPs and measured."""
    headers = {
        "weights_updates": "updates of weights",
        "architecture_updates": "of the architecture",
        "evaluations": "evaluations",
        "counted": "in updates of the baseline: counted",
        "measured": "measured",
        "seconds": "seconds",
    }
    rows = []
    for name in FRONTS:
        if name in result:
            cost = result[name]["cost"]
            cells = {header: f"{cost[each]:,.0f}" for each, header in headers.items()}
            rows.append({"": _called(result, name), **cells})
    return Table("", rows)


def _csv_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The points of both fronts in full precision."""
    rows = []
    for name in FRONTS:
        for point in result.get(name, {}).get("points", ()):
            measured = point.get("measured", {})
            parts = {f"measured_{part}_ms": value for part, value in measured.items() if part != "n"}
            plain = {key: point.get(key) for key in ("budget", "pattern", "by_layer", "loss")}
            of_what = {"front": name, "method": result[name]["method"]}
            rows.append({**of_what, **plain, "predicted_ms": point.get("predicted"), **parts})
    return rows


def _draw_front(result: Mapping[str, Any], path: Path) -> None:
    """Inherited loss against predicted latency: a small mark is a judged pattern, a large one a point of a front."""
    with picture(path, panel=(6.5, 4.5)) as ((axis,),):
        for name, style in styles(FRONTS).items():
            if name not in result:
                continue
            judged = [(each["latency"], each["loss"]) for each in result[name]["judged"]]
            axis.scatter(*zip(*judged, strict=True), s=8, alpha=0.4, c=style["color"])
            points = [(each["predicted"], each["loss"]) for each in result[name]["points"] if each["pattern"]]
            axis.plot(*np.reshape(points, (-1, 2)).T, label=_called(result, name), **style)
        baseline = result["baseline"]
        if baseline["loss"] is not None:
            star = {"markersize": 11, "linestyle": "", "label": "baseline"}
            axis.plot([baseline["predicted"]], [baseline["loss"]], "k*", **star)
        axis.set(xlabel="predicted latency, ms", ylabel="loss with inherited weights, bits")
        axis.legend()


def _draw_latency_check(check: Mapping[str, Any], path: Path) -> None:
    """Measured against predicted latency; bars are quartiles, the line is where the two are equal."""
    rows = list(check["patterns"].values())
    predicted = [row["predicted"] for row in rows]
    labels = ("predicted latency, ms", "measured latency, ms (quartiles)")
    with picture(path, panel=(5, 4.5)) as ((axis,),):
        if all("low" in row["measured"] for row in rows):
            lows, highs = ([row["measured"][part] for row in rows] for part in ("low", "high"))
            axis.vlines(predicted, lows, highs, color=COLOURS[0], alpha=0.6)
        draw_scatter(axis, predicted, [row["measured"]["median"] for row in rows], check["correlation"], labels)
        axis.axline((predicted[0], predicted[0]), slope=1, color="0.5", linestyle="--")


def draw_scatter(
    axis: Any,
    one: Sequence[float],
    other: Sequence[float],
    found: Optional[Mapping[str, float]],
    labels: tuple[str, str],
) -> None:
    """A mark a pattern; the rank correlation above."""
    axis.plot(one, other, linestyle="", marker="o", color=COLOURS[0])
    axis.set(xlabel=labels[0], ylabel=labels[1])
    if found is not None:
        axis.set_title(f"Spearman {found['spearman']:.3f}, {found['n']} patterns")
