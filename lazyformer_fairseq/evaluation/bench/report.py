"""Tables and plots for a benchmark of models."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator

from lazyformer_fairseq.evaluation.bench import models
from lazyformer_fairseq.evaluation.bench.settings import WORKLOADS
from lazyformer_fairseq.evaluation.costs.machine import short_device_name
from lazyformer_fairseq.modules.attention.selection import AUTO
from lazyformer_fairseq.report.figures import handles, picture, styles
from lazyformer_fairseq.report.numbers import noise_warning, with_spread
from lazyformer_fairseq.report.page import Block, Notes
from lazyformer_fairseq.report.tables import Table

# The header of a speed-up column names its baseline; these are the full descriptions.
EXPLAINED = {
    models.FAIRSEQ: "fairseq's RobertaModel with the arch roberta_base, as shipped: dropout and attention dropout 0.1",
    models.HUGGING_FACE: "Hugging Face's BertModel, attn_implementation=sdpa, dropout 0.1, attention dropout 0; its "
    "masked-LM head receives only the masked positions",
    models.OURS: "bert_base --attention-dropout 0 with the same relative bias as the row, on its fastest back end, "
    "which is named at the end of each entry",
    models.REGISTERED: "the unmodified --baseline-arch (by default bert_base with attention dropout 0.1, as in the "
    "LazyFormer paper)",
    models.TRANSFORMER_XL: "transformer_xl_base, or transformer_xl_tiny if all archs end in _tiny",
}
LEGEND = """\
Times are medians, followed in parentheses by the quartiles or, with fewer than three rounds, by the number of rounds,
n. "x NAME" is the speed-up over NAME, computed from the medians and followed in parentheses by the quartiles of the
per-round ratios; "limit" is the speed-up expected from FLOPs alone. FLOPs exclude what a back end recomputes. "of peak"
is the model's FLOP/s as a percentage of the FLOP/s of the fastest matmul in the same rounds. MB (10^6 bytes) is the
memory of the weights and the optimizer state plus the peak memory of a call."""


def page(results: Mapping[str, Any]) -> list[Block]:
    """Build a page with one table per cell and an explanation of the baselines."""
    blocks = [block for cell in results["cells"] for block in _cell_page(cell)]
    if len(results["cells"]) < results["cells_planned"]:
        blocks.append("The benchmark was stopped before everything was measured.")
    timings = {}
    for cell in results["cells"]:
        for row in cell["rows"]:
            name = f"{row['model']} ({cell['workload']}, n = {cell['time']})"
            timings[name] = row["seconds"]
    blocks += noise_warning(timings)
    sizes = f"The baselines for encoders have the sizes of {results['settings']['baseline_arch']}:"
    baselines = _baselines(results["cells"])
    return [*blocks, LEGEND, sizes, Notes([f"{name}: {EXPLAINED[name]}" for name in baselines])]


def _baselines(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the baselines that at least one model was compared with."""
    compared_with: set[str] = set()
    for cell in cells:
        for row in cell["rows"]:
            compared_with.update(row["against"])
    return [name for name in models.BASELINES if name in compared_with]


def _cell_page(cell: Mapping[str, Any]) -> Iterator[Block]:
    rounds = 0
    if cell["rows"]:
        rounds = len(cell["rows"][0]["seconds"]["samples"])
    unit = "round" if rounds == 1 else "rounds"
    yield (
        f"{WORKLOADS[cell['workload']].title}: n = {cell['time']}, batch {cell['batch']}, {cell['precision']}; "
        f"{rounds} {unit}; fastest matmul {cell['matrix_peak'] / 1e9:,.0f} GFLOP/s"
    )
    speedups = {f"x {name}": name for name in _baselines([cell])}
    if cell["rows"]:
        rows = []
        for row in cell["rows"]:
            of_row = {header: _speedup(row, name) for header, name in speedups.items()}
            rows.append(_cells(row) | of_row)
        yield Table("", rows, left=("back end", *speedups))
    if cell["left_out"]:
        yield "\n".join(f"skipped: {name} ({reason})" for name, reason in cell["left_out"].items())


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table row's cells by header."""
    back_end = row["back_end"]
    if back_end == AUTO:
        back_end = f"auto: {', '.join(row['back_ends_used'])}"
    return {
        "model": row["model"],
        "(W, H, N)": str(tuple(row["sizes"])),
        "bias": row["buckets"] or "none",
        "back end": back_end,
        "parameters": f"{row['parameters']:,}",
        "ms": milliseconds(row["seconds"]),
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "GFLOPs": f"{row['flops'] / 1e9:,.4g}",
        "GFLOP/s": f"{row['flops_per_second'] / 1e9:,.0f}",
        "of peak": f"{row['share_of_peak']:.0%}",
        "MB": f"{row['memory_bytes'] / 1e6:,.0f}",
    }


def milliseconds(seconds: Mapping[str, Any]) -> str:
    """Format the median and quartiles in milliseconds, with at least three significant digits."""
    times = {key: 1000 * seconds[key] for key in ("median", "low", "high") if key in seconds}
    lowest = min(times.values())
    digits = 2
    if lowest >= 100:
        digits = 0
    elif lowest >= 10:
        digits = 1
    return with_spread({**seconds, **times}, digits)


def _speedup(row: Mapping[str, Any], baseline: str) -> str:
    beside = row["against"].get(baseline)
    if beside is None:
        return "not measured"
    found = f"{with_spread({**beside, 'median': beside['speedup']}, 2)}, limit {beside['limit']:.2f}"
    if baseline in models.BIASED:
        found += f", {beside['back_end']}"
    return found


def draw_all(results: Mapping[str, Any], folder: Path) -> None:
    """Draw one plot per measured encoder workload and precision."""

    def work_of(cell: Mapping[str, Any]) -> str:
        work = cell["workload"]
        if work == "inference":
            work = "latency" if cell["batch"] == 1 else "throughput"
        return f"{work}, {cell['precision']}"

    cells = [cell for cell in results["cells"] if cell["workload"] != "causal"]
    for work, same in itertools.groupby(sorted(cells, key=work_of), key=work_of):
        measured = list(same)
        if _baselines(measured):  # empty if no model fit into memory
            title = f"{work}, {short_device_name(results['machine']['device'])}"
            draw_speedups(measured, title, folder / f"speedup_{work.replace(', ', '_')}.png")


def draw_speedups(measured: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the speed-up against n, as in Figure 3 of the LazyFormer paper.

    There is one panel per baseline, with one line per model, back end and bias. Bars show the quartiles of the
    per-round ratios; thin lines without markers show the speed-up expected from FLOPs alone.
    """
    names = _baselines(measured)
    lengths = sorted({cell["time"] for cell in measured})
    labels = [label for name in names for label in _lines(measured, name)]
    style_of = styles(dict.fromkeys(labels))
    panels = {"panel": (4.6, 4.4), "sharex": True, "sharey": True, "title": title, "legend": handles(style_of)}
    with picture(path, columns=len(names), **panels) as (axes,):
        for name, axis in zip(names, axes, strict=True):
            for label, points in _lines(measured, name).items():
                style = style_of[label]
                times, comparisons = zip(*points, strict=True)
                limits = [comparison["limit"] for comparison in comparisons]
                speedups = [comparison["speedup"] for comparison in comparisons]
                axis.plot(times, limits, color=style["color"], alpha=0.5, linewidth=0.8)
                for time, comparison in points:
                    if "low" in comparison:
                        axis.vlines(time, comparison["low"], comparison["high"], color=style["color"], alpha=0.6)
                axis.plot(times, speedups, markersize=5, label=label, **style)
            axis.axhline(1, color="0.4", linewidth=0.8)
            axis.set_title(f"against {name}", fontsize=10)
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, lengths)
            axis.minorticks_off()
            axis.set_xlabel("tokens per sequence, n")
        axes[0].set_yscale("log", base=2)
        locator = LogLocator(base=2, subs=(1, 1.25, 1.5, 1.75))
        axes[0].yaxis.set_major_locator(locator)
        axes[0].yaxis.set_major_formatter("{x:g}")
        axes[0].set_ylabel("speed-up over the baseline\n(thin lines: limit set by FLOPs)")


_Points = list[tuple[int, Mapping[str, Any]]]  # pairs (n, comparison with a baseline)


def _lines(measured: Sequence[Mapping[str, Any]], baseline: str) -> dict[str, _Points]:
    """Return the points of all models except the baselines, by model, back end and bias."""
    found: dict[str, _Points] = {}
    for cell in sorted(measured, key=lambda cell: cell["time"]):
        for row in cell["rows"]:
            if row["baseline"] is None and baseline in row["against"]:
                bias = f"{row['buckets']} buckets" if row["buckets"] else "no bias"
                label = f"{row['model']}, {row['back_end']}, {bias}"
                point = (cell["time"], row["against"][baseline])
                found.setdefault(label, []).append(point)
    return found
