"""What a search found, as tables and pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lazyformer_fairseq.patterns.grammar import read_sublayer
from lazyformer_fairseq.report.figures import picture, styles
from lazyformer_fairseq.report.numbers import with_spread
from lazyformer_fairseq.report.page import Block, markdown, write_page
from lazyformer_fairseq.report.tables import Table

FRONTS = ("found", "control")


def write_report(result: Mapping[str, Any], folder: Path) -> None:
    """table.md, front.png; of gradient descent also probabilities.png."""
    write_page(_page(result), folder, "table")
    _draw_front(result, folder / "front.png")
    if result["probabilities"]:
        _draw_probabilities(result, folder / "probabilities.png")


def _draw_probabilities(result: Mapping[str, Any], path: Path) -> None:
    """Layers along x, candidates as rows, brighter where more probable (PAR Transformer, Figure 2)."""
    names, tables = result["settings"]["candidates"], [np.asarray(table).T for table in result["probabilities"]]
    layers = tables[0].shape[1]
    panel = (max(5.0, 0.32 * layers + 2.5), 0.5 * len(names) + 1.4)
    with picture(path, len(tables), panel=panel) as axes:
        for axis, table, point in zip(axes.flat, tables, result["found"]["points"], strict=True):
            axis.grid(False)
            image = axis.imshow(table, cmap="viridis", vmin=0, vmax=1, aspect="auto")
            axis.scatter(range(layers), table.argmax(axis=0), s=14, color="white", edgecolors="black", linewidths=0.6)
            axis.set_yticks(range(len(names)), [_label(name) for name in names])
            axis.set_xticks(range(layers), range(1, layers + 1), fontsize=7)
            axis.set_xlabel(f"layer, the lowest first{_of_budget(point, '; ')}")
            axis.figure.colorbar(image, label="probability", pad=0.02)


def _of_budget(point: Mapping[str, Any], before: str = "") -> str:
    return "" if point["budget"] is None else f"{before}{point['budget']:.0%}"


def _label(name: str) -> str:
    """``self-attention``, and its settings if it has any."""
    sublayer = read_sublayer(name)
    return sublayer.kind.name + sublayer.text[1:]


def report_of(result: Mapping[str, Any]) -> str:
    """What was found beside its control, what each cost, and how well latency was predicted; in Markdown."""
    return markdown(_page(result)).rstrip()


def _page(result: Mapping[str, Any]) -> list[Block]:
    page: list[Block] = [_front_table(result), _costs_table(result)]
    if found := result["latency_correlation"]:
        page.append(
            f"Predicted with measured latency of these {found['n']} patterns: Spearman's rank correlation "
            f"{found['spearman']:.3f}, Kendall's tau {found['kendall']:.3f}."
        )
    return [*page, "Inherited losses are what a search goes by. To train the patterns from scratch, side by side:",
            _comparison(result)]  # fmt: skip


def _comparison(result: Mapping[str, Any]) -> str:
    """A command that trains the baseline and all that was found, in the sizes of the search."""
    settings, sizes = result["settings"], result["sizes"]
    patterns = {"baseline": result["baseline"]["pattern"]}
    for front in FRONTS:
        points = result.get(front, {"points": ()})["points"]
        patterns |= {f"{front}{_of_budget(each, '-').rstrip('%')}": each["pattern"] for each in points}
    lines = [f"lazyformer compare {settings['data']} FOLDER --task {settings['task']}"]
    lines += [f"  --model '{name}={pattern}'" for name, pattern in patterns.items() if pattern]
    widths = (sizes["embed_dim"], sizes["ffn_embed_dim"], sizes["num_heads"])
    lines.append("  --embed-dim {} --ffn-embed-dim {} --heads {}".format(*widths))
    return "```bash\n" + " \\\n".join(lines) + "\n```"


def _front_table(result: Mapping[str, Any]) -> Table:
    """The baseline, then of each budget a row of the method and one of its control."""
    baseline = result["baseline"]
    rows = [_row("baseline", "", baseline, baseline)]
    for number, point in enumerate(result["found"]["points"]):
        for name in FRONTS:
            if name in result:
                of_budget = result[name]["points"][number]
                rows.append(_row(_called(result, name), _of_budget(point), of_budget, baseline))
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
    """Updates and evaluations, both in updates of the baseline by FLOPs."""
    headers = {
        "weights_updates": "updates of weights",
        "architecture_updates": "of the architecture",
        "evaluations": "evaluations",
        "counted": "in updates of the baseline",
    }
    rows = []
    for name in FRONTS:
        if name in result:
            cost = result[name]["cost"]
            cells = {header: f"{cost[each]:,.0f}" for each, header in headers.items()}
            rows.append({"": _called(result, name), **cells})
    return Table("", rows)


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
