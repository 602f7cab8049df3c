"""Pictures of a benchmark: LazyFormer's Figure 3 and Table 2, PAR Transformer's Tables 4 and 6, as measured here."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from lazyformer_fairseq.measure.bench.models.entries import BASELINES, OURS
from lazyformer_fairseq.measure.bench.models.report import cells
from lazyformer_fairseq.report.figures import styles, write_picture

TABLE_2_LENGTH = 512  # LazyFormer, section 3.1
TABLE_4_LENGTH = 384  # SQuAD's, on which PAR's Table 4 measures


def draw_all(results: dict[str, Any], folder: Path) -> list[str]:
    """Draws all pictures that have measurements; returns the names of the files."""
    machine, drawn = results["machine"]["device"], []

    def draw(kind: str, drawing: Callable, measured: Any, title: str) -> None:
        drawn.append(f"{kind}_{precision}.png")
        drawing(measured, title, folder / drawn[-1])

    for precision in results["settings"]["precisions"]:
        of_encoders = [cell for cell in results["cells"] if cell["precision"] == precision]
        for (workload, many), same in _by_workload(of_encoders):
            kind = workload if workload != "inference" else "throughput" if many else "latency"
            draw(f"speedup_{kind}", draw_speedups, same, f"{kind}, {precision}, {machine}")
        training = [cell for cell in of_encoders if cell["workload"] == "training"]
        if training:
            draw("table_2", draw_table_2, _nearest(training, TABLE_2_LENGTH), machine)
        latency = [cell for cell in of_encoders if cell["workload"] == "inference" and cell["batch"] == 1]
        if latency:
            draw("table_4", draw_table_4, _nearest(latency, TABLE_4_LENGTH), machine)
        causal = [row for row in results["causal"] if row["precision"] == precision]
        if causal:
            draw("table_6", draw_table_6, causal, machine)
    return drawn


def draw_speedups(measured: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Speed-up against n (LazyFormer, Figure 3): a panel for each baseline, a line for each model, back end and bias.

    Bars are the quartiles of the ratios round by round; a thin line without marks shows what the FLOPs alone allow.
    """
    names = [name for name in BASELINES if any(name in row["against"] for cell in measured for row in cell["rows"])]
    lengths = sorted({cell["time"] for cell in measured})
    figure = Figure(figsize=(4.6 * len(names), 4.4), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False, sharex=True, sharey=True)[0]
    for name, axis in zip(names, axes, strict=True):
        lines = _lines(measured, name)
        for label, look in styles(lines).items():
            times, beside = zip(*lines[label], strict=True)
            axis.plot(times, [one["limit"] for one in beside], color=look["color"], alpha=0.5, linewidth=0.8)
            for time, one in lines[label]:
                if "low" in one:
                    axis.vlines(time, one["low"], one["high"], color=look["color"], alpha=0.6)
            axis.plot(times, [one["speedup"] for one in beside], markersize=5, label=label, **look)
        axis.axhline(1, color="0.4", linewidth=0.8)
        axis.set_title(f"against {name}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, lengths)
        axis.minorticks_off()
        axis.set_xlabel("tokens a sequence, n")
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log", base=2)
    axes[0].yaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.25, 1.5, 1.75)))
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("speed-up (thin: what FLOPs allow)")
    figure.suptitle(title, fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3), frameon=False, fontsize=8)
    write_picture(figure, path)


def _lines(measured: Sequence[dict[str, Any]], baseline: str) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Points of each model that is no baseline, by model, back end and bias: (n, how it compares)."""
    found: dict[str, list] = {}
    for cell in sorted(measured, key=lambda cell: cell["time"]):
        for row in cell["rows"]:
            if row["baseline"] is None and baseline in row["against"]:
                bias = f"{row['buckets']} buckets" if row["buckets"] else "no bias"
                points = found.setdefault(f"{row['model']}, {row['back_end']}, {bias}", [])
                points.append((cell["time"], row["against"][baseline]))
    return found


def draw_table_2(cell: dict[str, Any], machine: str, path: Path) -> None:
    """Parameters, sizes, time of an update and speed-up (LazyFormer, Table 2); our BERT on its fastest back end."""
    rows = []
    for row in _without_slower_baselines(cell["rows"]):
        speedups = {f"x {name}": f"{beside['speedup']:.2f}" for name, beside in row["against"].items()}
        rows.append({**cells(row, ("model", "parameters", "(W, H, N)", "bias", "back end", "ms")), **speedups})
    title = f"training step, n = {cell['time']}, batch {cell['batch']}, {cell['precision']}, {machine}"
    draw_table(rows, title, path)


def draw_table_4(cell: dict[str, Any], machine: str, path: Path) -> None:
    """Architecture, parameters, FLOPs and latency of encoders (PAR Transformer, Table 4 with Table 6's columns)."""
    headers = ("model", "pattern", "bias", "back end", "parameters", "GFLOPs", "ms")
    rows = [cells(row, headers) for row in _without_slower_baselines(cell["rows"])]
    draw_table(rows, f"encoder at batch 1, n = {cell['time']}, {cell['precision']}, {machine}", path)


def draw_table_6(rows: Sequence[dict[str, Any]], machine: str, path: Path) -> None:
    """Architecture, parameters, FLOPs and latency of causal language models (PAR Transformer, Table 6)."""
    first = rows[0]
    title = f"batch 1, {first['tgt_len']} tokens, {first['mem_len']} remembered, {first['precision']}, {machine}"
    draw_table([cells(row, ("model", "pattern", "parameters", "GFLOPs", "ms")) for row in rows], title, path)


def draw_table(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """A table as a picture; a cell that a row lacks stays empty."""
    headers = list(dict.fromkeys(header for row in rows for header in row))
    lines = [[str(row.get(header, "")).strip("`") for header in headers] for row in rows]
    widths = [max(len(line[column]) for line in [headers, *lines]) + 2 for column in range(len(headers))]
    figure = Figure(figsize=(0.085 * sum(widths), 0.22 * (len(lines) + 1)))
    axis = figure.subplots()
    axis.axis("off")
    axis.set_title(title, fontsize=10)
    shares = [width / sum(widths) for width in widths]
    table = axis.table(lines, colLabels=headers, colWidths=shares, cellLoc="right", bbox=(0, 0, 1, 1))
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    for (line, column), cell in table.get_celld().items():
        cell.visible_edges = "B" if line == 0 else "open"
        if column == 0:
            cell.set_text_props(ha="left")
    write_picture(figure, path)


def _without_slower_baselines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, but only the fastest of our BERT with a bias."""
    fastest: dict[int, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["seconds"]["median"]):
        if row["baseline"] == OURS:
            fastest[row["buckets"]] = row
    return [row for row in rows if row["baseline"] != OURS or row is fastest[row["buckets"]]]


def _by_workload(measured: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[str, bool], list[dict[str, Any]]]]:
    """Cells that differ in length alone: ((workload, whether inference has more than one sequence), cells)."""

    def key(cell: dict[str, Any]) -> tuple[str, bool]:
        return cell["workload"], cell["workload"] == "inference" and cell["batch"] > 1

    for name, same in groupby(sorted(measured, key=key), key=key):
        yield name, list(same)


def _nearest(measured: Sequence[dict[str, Any]], time: int) -> dict[str, Any]:
    return min(measured, key=lambda cell: abs(cell["time"] - time))
