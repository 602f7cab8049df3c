"""The results of `lazyformer bench`: tables on the screen, in Markdown and in CSV; speed-up against length, drawn."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator

from lazyformer_fairseq.measure.bench.models import BASELINES, FAIRSEQ, HUGGING_FACE, OURS, TRANSFORMER_XL
from lazyformer_fairseq.measure.bench.settings import WORKLOADS
from lazyformer_fairseq.report.figures import handles, picture, styles
from lazyformer_fairseq.report.numbers import with_spread
from lazyformer_fairseq.report.page import Block, Notes
from lazyformer_fairseq.report.tables import Table

# A speed-up's column header names its baseline; here it is in full.
EXPLAINED = {
    FAIRSEQ: "fairseq's RobertaModel by its arch roberta_base, as shipped: dropout and attention dropout 0.1",
    HUGGING_FACE: "Hugging Face's BertModel, attn_implementation=sdpa, dropout 0.1, attention dropout 0; its masked-LM "
    "head is given the masked positions alone",
    OURS: "bert_base --attention-dropout 0 with the row's own relative bias, on the back end that was fastest in this "
    "cell, which is named",
    TRANSFORMER_XL: "transformer_xl_base; beside archs that end in _tiny, transformer_xl_tiny",
}
LEGEND = """\
Medians, quartiles in brackets, or how few rounds the time allowed, n. "x NAME": how many times faster than NAME, by the
medians; in brackets the quartiles of the ratios round by round; "limit" is what the FLOPs alone allow. FLOPs are those
that the back end does, "of peak" is their share of the fastest matrix product in the same rounds. MB (10^6 bytes):
weights, optimizer and the highest moment of a call."""

# By header, what the cell of a row holds.
CELLS = {
    "model": lambda row: row["model"],
    "(W, H, N)": lambda row: str(tuple(row["sizes"])),
    "bias": lambda row: row["buckets"] or "none",
    "back end": lambda row: (
        f"auto: {', '.join(row['back_end_used'])}" if row["back_end"] == "auto" else row["back_end"]
    ),
    "parameters": lambda row: f"{row['parameters']:,}",
    "ms": lambda row: milliseconds(row["seconds"]),
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "GFLOPs": lambda row: f"{row['flops'] / 1e9:,.4g}",
    "GFLOP/s": lambda row: f"{row['flops_per_second'] / 1e9:,.0f}",
    "of peak": lambda row: f"{row['share_of_peak']:.0%}",
    "MB": lambda row: f"{row['memory_bytes'] / 1e6:,.0f}",
}


def page(results: dict[str, Any]) -> list[Block]:
    """A table for each cell, and an explanation of the baselines."""
    blocks = [block for cell in results["cells"] for block in _cell_page(cell)]
    if len(results["cells"]) < results["cells_planned"]:
        blocks.append("The run was stopped before all was measured.")
    sizes = f"Baselines of encoders have the sizes of {results['settings']['baseline_arch']}:"
    beside = _baselines(results["cells"])
    return [*blocks, LEGEND, sizes, Notes([f"{name}: {EXPLAINED[name]}" for name in beside])]


def _baselines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Those that something was compared with."""
    return [name for name in BASELINES if any(name in row["against"] for cell in cells for row in cell["rows"])]


def _cell_page(cell: dict[str, Any]) -> list[Block]:
    rounds = len(cell["rows"][0]["seconds"]["samples"])
    title = (
        f"{WORKLOADS[cell['workload']][0]}: n = {cell['time']}, batch {cell['batch']}, {cell['precision']}; "
        f"{rounds} round{'s' * (rounds > 1)}; fastest matrix product {cell['matrix_peak'] / 1e9:,.0f} GFLOP/s"
    )
    speedups = {f"x {name}": name for name in _baselines([cell])}
    rows = [
        {
            **{header: value_of(row) for header, value_of in CELLS.items()},
            **{header: _speedup(row, name) for header, name in speedups.items()},
        }
        for row in cell["rows"]
    ]
    left_out = "\n".join(f"left out: {name} ({reason})" for name, reason in cell["left_out"].items())
    return [title, Table("", rows, left=("back end", *speedups)), *([left_out] if left_out else [])]


def milliseconds(seconds: dict[str, Any]) -> str:
    """Median with quartiles."""
    times = {key: 1000 * seconds[key] for key in ("median", "low", "high") if key in seconds}
    lowest = min(times.values())
    return with_spread({**seconds, **times}, 0 if lowest >= 100 else 1 if lowest >= 10 else 2)


def _speedup(row: dict[str, Any], baseline: str) -> str:
    beside = row["against"].get(baseline)
    if beside is None:
        return "not measured"
    kernel = f", {beside['back_end']}" if baseline == OURS else ""
    return f"{with_spread({**beside, 'median': beside['speedup']}, 2)}, limit {beside['limit']:.2f}{kernel}"


def csv_rows(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One flat row for each row of each cell."""
    for cell in results["cells"]:
        for row in cell["rows"]:
            flat = {key: cell[key] for key in ("workload", "precision", "time", "batch", "matrix_peak")}
            flat |= {key: value for key, value in row.items() if not isinstance(value, (dict, list))}
            flat |= {key: " ".join(map(str, row[key])) for key in ("back_end_used", "sizes")}
            flat |= {f"seconds_{key}": value for key, value in row["seconds"].items() if key != "samples"}
            for name, beside in row["against"].items():
                flat |= {f"{key} against {name}": value for key, value in beside.items()}
            yield flat


def draw_all(results: dict[str, Any], folder: Path) -> None:
    """Draws a picture for each kind of work with encoders and each precision that was measured."""

    def kind_of(cell: dict[str, Any]) -> str:
        alone = "latency" if cell["batch"] == 1 else "throughput"
        return f"{alone if cell['workload'] == 'inference' else cell['workload']}, {cell['precision']}"

    cells = [cell for cell in results["cells"] if cell["workload"] != "causal"]
    for kind, same in groupby(sorted(cells, key=kind_of), key=kind_of):
        name = f"speedup_{kind.replace(', ', '_')}.png"
        draw_speedups(list(same), f"{kind}, {results['machine']['device']}", folder / name)


def draw_speedups(measured: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Speed-up against n (LazyFormer, Figure 3): a panel for each baseline, a line for each model, back end and bias.

    Bars are the quartiles of the ratios round by round; a thin line without marks shows what the FLOPs alone allow.
    """
    names, lengths = _baselines(measured), sorted({cell["time"] for cell in measured})
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
