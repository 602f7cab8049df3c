"""Pictures of a benchmark: speed-up against length, as in LazyFormer's Figure 3."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator

from lazyformer_fairseq.measure.bench.models import BASELINES
from lazyformer_fairseq.report.figures import handles, picture, styles


def draw_all(results: dict[str, Any], folder: Path) -> list[str]:
    """Draws a picture for each kind of work and precision that was measured; returns the names of the files."""
    drawn = []
    for precision in results["settings"]["precisions"]:
        cells = [cell for cell in results["cells"] if cell["precision"] == precision]
        for (workload, many), same in _by_workload(cells):
            kind = workload if workload != "inference" else "throughput" if many else "latency"
            drawn.append(f"speedup_{kind}_{precision}.png")
            draw_speedups(same, f"{kind}, {precision}, {results['machine']['device']}", folder / drawn[-1])
    return drawn


def draw_speedups(measured: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Speed-up against n (LazyFormer, Figure 3): a panel for each baseline, a line for each model, back end and bias.

    Bars are the quartiles of the ratios round by round; a thin line without marks shows what the FLOPs alone allow.
    """
    names = [name for name in BASELINES if any(name in row["against"] for cell in measured for row in cell["rows"])]
    lengths = sorted({cell["time"] for cell in measured})
    style_of = styles(dict.fromkeys(label for name in names for label in _lines(measured, name)))
    panels = {"panel": (4.6, 4.4), "sharex": True, "sharey": True, "title": title, "legend": handles(style_of)}
    with picture(path, columns=len(names), **panels) as (axes,):
        for name, axis in zip(names, axes, strict=True):
            for label, points in _lines(measured, name).items():
                style, (times, beside) = style_of[label], zip(*points, strict=True)
                axis.plot(times, [one["limit"] for one in beside], color=style["color"], alpha=0.5, linewidth=0.8)
                for time, one in points:
                    if "low" in one:
                        axis.vlines(time, one["low"], one["high"], color=style["color"], alpha=0.6)
                axis.plot(times, [one["speedup"] for one in beside], markersize=5, label=label, **style)
            axis.axhline(1, color="0.4", linewidth=0.8)
            axis.set_title(f"against {name}", fontsize=10)
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, lengths)
            axis.minorticks_off()
            axis.set_xlabel("tokens a sequence, n")
        axes[0].set_yscale("log", base=2)
        axes[0].yaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.25, 1.5, 1.75)))
        axes[0].yaxis.set_major_formatter("{x:g}")
        axes[0].set_ylabel("speed-up (thin: what FLOPs allow)")


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


def _by_workload(measured: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[str, bool], list[dict[str, Any]]]]:
    """Cells that differ in length alone: ((workload, whether inference has more than one sequence), cells)."""

    def key(cell: dict[str, Any]) -> tuple[str, bool]:
        return cell["workload"], cell["workload"] == "inference" and cell["batch"] > 1

    for name, same in groupby(sorted(measured, key=key), key=key):
        yield name, list(same)
