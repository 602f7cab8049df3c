"""The results of `lazyformer bench` as tables on the screen, in Markdown and in CSV."""

from collections.abc import Iterable, Iterator
from typing import Any

from lazyformer_fairseq.measure.bench.models import BASELINES, FAIRSEQ, HUGGING_FACE, OURS
from lazyformer_fairseq.measure.bench.settings import WORKLOADS
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
}
LEGEND = """\
Medians, quartiles in brackets, or how few rounds the time allowed, n. "x NAME": how many times faster than NAME, by the
medians; in brackets the quartiles of the ratios round by round; "limit" is what the FLOPs alone allow. FLOPs are those
that the back end does, "of peak" is their share of the fastest matrix product in the same rounds. MB (10^6 bytes):
weights, optimizer and the highest moment of a call."""

# By header, what the cell of a row holds.
CELLS = {
    "model": lambda row: row["model"],
    "pattern": lambda row: f"`{row['pattern']}`",
    "bias": lambda row: row["buckets"] or "none",
    "back end": lambda row: (
        f"auto: {', '.join(row['back_end_used'])}" if row["back_end"] == "auto" else row["back_end"]
    ),
    "precision": lambda row: row["precision"],
    "T, M": lambda row: f"{row['tgt_len']}, {row['mem_len']}",
    "(W, H, N)": lambda row: str(tuple(row["sizes"])),
    "parameters": lambda row: f"{row['parameters']:,}",
    "ms": lambda row: milliseconds(row["seconds"]),
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "GFLOPs": lambda row: f"{row['flops'] / 1e9:,.4g}",
    "GFLOP/s": lambda row: f"{row['flops_per_second'] / 1e9:,.0f}",
    "of peak": lambda row: f"{row['share_of_peak']:.0%}",
    "MB": lambda row: f"{row['memory_bytes'] / 1e6:,.0f}",
}
SIZES, SPEED = ("model", "(W, H, N)", "bias", "back end", "parameters"), ("ms", "tokens/s", "GFLOPs", "GFLOP/s")
OF_ENCODERS = (*SIZES, *SPEED, "of peak", "MB")
OF_CAUSAL_MODELS = ("model", "pattern", "precision", "T, M", "parameters", "GFLOPs", "ms", "of peak")


def cells(row: dict[str, Any], headers: Iterable[str]) -> dict[str, Any]:
    return {header: CELLS[header](row) for header in headers}


def page(results: dict[str, Any]) -> list[Block]:
    """A table for each cell, and an explanation of the baselines."""
    blocks = [block for cell in results["cells"] for block in _cell_page(cell)]
    if results["causal"]:
        title = f"Causal language models, batch 1; {rounds_of(results['causal'])}"
        blocks += [title, _causal_table(results["causal"])]
    if stopped_early(results):
        blocks.append("The run was stopped before all was measured.")
    sizes = f"Baselines have the sizes of {results['settings']['baseline_arch']}:"
    return [*blocks, LEGEND, sizes, Notes([f"{name}: {EXPLAINED[name]}" for name in BASELINES])]


def stopped_early(results: dict[str, Any]) -> bool:
    """Whether planned cells are missing."""
    causal = {row["precision"] for row in results["causal"]}
    return len(results["cells"]) + len(causal) < results["cells_planned"]


def _cell_page(cell: dict[str, Any]) -> list[Block]:
    title = (
        f"{WORKLOADS[cell['workload']][0]}: n = {cell['time']}, batch {cell['batch']}, {cell['precision']}; "
        f"{rounds_of(cell['rows'])}; fastest matrix product {cell['matrix_peak'] / 1e9:,.0f} GFLOP/s"
    )
    speedups = {f"x {name}": name for name in BASELINES}
    rows = [
        {**cells(row, OF_ENCODERS), **{header: _speedup(row, name) for header, name in speedups.items()}}
        for row in cell["rows"]
    ]
    left_out = "\n".join(f"left out: {name} ({reason})" for name, reason in cell["left_out"].items())
    return [title, Table("", rows, left=("back end", *speedups)), *([left_out] if left_out else [])]


def _causal_table(rows: list[dict[str, Any]]) -> Table:
    """In the form of PAR Transformer's Table 6."""
    (baseline,) = rows[0]["against"]
    lines = []
    for row in rows:
        beside = row["against"][baseline]
        speedup = f"{beside['speedup']:.2f}, limit {beside['limit']:.2f}"
        lines.append({**cells(row, OF_CAUSAL_MODELS), f"x {baseline}": speedup})
    return Table("", lines, left=("pattern", "precision"))


def milliseconds(seconds: dict[str, Any]) -> str:
    """Median with quartiles."""
    times = {key: 1000 * seconds[key] for key in ("median", "low", "high") if key in seconds}
    lowest = min(times.values())
    return with_spread({**seconds, **times}, 0 if lowest >= 100 else 1 if lowest >= 10 else 2)


def rounds_of(rows: list[dict[str, Any]]) -> str:
    """How many samples each row has."""
    number = len(rows[0]["seconds"]["samples"])
    return f"{number} rounds" if number > 1 else "1 round"


def _speedup(row: dict[str, Any], baseline: str) -> str:
    beside = row["against"].get(baseline)
    if beside is None:
        return "not measured"
    kernel = f", {beside['back_end']}" if baseline == OURS else ""
    return f"{with_spread({**beside, 'median': beside['speedup']}, 2)}, limit {beside['limit']:.2f}{kernel}"


def csv_rows(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One flat row for each row of each cell, causal models included."""
    for cell in results["cells"]:
        for row in cell["rows"]:
            flat = {key: cell[key] for key in ("workload", "precision", "time", "batch", "matrix_peak")}
            yield flat | _flat(row)
    for row in results["causal"]:
        yield {"workload": "causal latency", "time": row["tgt_len"], "batch": 1, **_flat(row)}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in row.items() if not isinstance(value, (dict, list))}
    if "back_end_used" in row:
        flat |= {"back_end_used": " ".join(row["back_end_used"]), "sizes": " ".join(map(str, row["sizes"]))}
    flat |= {f"seconds_{key}": row["seconds"][key] for key in ("median", "low", "high", "n") if key in row["seconds"]}
    for name, beside in row["against"].items():
        flat |= {f"{key} against {name}": value for key, value in beside.items()}
    return flat
