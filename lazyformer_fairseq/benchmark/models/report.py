"""The results of a benchmark as tables on the screen and in Markdown, as CSV and as JSON."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

from lazyformer_fairseq.benchmark.models.entries import BASELINES, FAIRSEQ, HUGGING_FACE, OURS
from lazyformer_fairseq.benchmark.models.workloads import WORKLOADS

# A speed-up's column header names its baseline; here it is in full.
EXPLAINED = {
    FAIRSEQ: "fairseq's RobertaModel by its arch roberta_base, as shipped: dropout and attention dropout 0.1",
    HUGGING_FACE: "Hugging Face's BertModel, attn_implementation=sdpa, dropout 0.1, attention dropout 0; its masked-LM "
    "head is given the masked positions alone",
    OURS: "bert_base --attention-dropout 0 with the row's own relative bias, on the back end that was fastest in this "
    "cell, which is named",
}
LEGEND = """\
Medians, quartiles in brackets. "x NAME": how many times faster than NAME, by the medians; in brackets the quartiles of
the ratios round by round; "limit" is what the FLOPs alone allow. FLOPs are those that the back end does, "of peak" is
their share of the fastest matrix product in the same rounds. MB (10^6 bytes): weights, optimizer and the highest moment
of a call."""


def tables(results: dict[str, Any]) -> str:
    """A Markdown table for each cell, and an explanation of the baselines."""
    parts = [_cell_table(cell) for cell in results["cells"]]
    if results["causal"]:
        parts.append(f"Causal language models, batch 1\n\n{causal_table(results['causal'])}")
    if stopped_early(results):
        parts.append("The run was stopped before all was measured.")
    baselines = [f"- {name}: {EXPLAINED[name]}" for name in BASELINES]
    sizes = f"Baselines have the sizes of {results['settings']['baseline_arch']}:"
    return "\n\n".join([*parts, LEGEND, "\n".join([sizes, "", *baselines])])


def stopped_early(results: dict[str, Any]) -> bool:
    """Whether planned cells are missing."""
    causal = {row["precision"] for row in results["causal"]}
    return len(results["cells"]) + len(causal) < results["cells_planned"]


def _cell_table(cell: dict[str, Any]) -> str:
    headers = ["model", "bias", "back end", "parameters", "ms", "tokens/s", "GFLOPs", "GFLOP/s", "of peak", "MB"]
    headers += [f"x {name}" for name in BASELINES]
    lines = [
        [
            row["model"],
            row["buckets"] or "none",
            back_end_of(row),
            f"{row['parameters']:,}",
            milliseconds(row["seconds"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['flops'] / 1e9:,.4g}",
            f"{row['flops_per_second'] / 1e9:,.0f}",
            f"{row['share_of_peak']:.0%}",
            f"{row['memory_bytes'] / 1e6:,.0f}",
            *(_speedup(row, name) for name in BASELINES),
        ]
        for row in cell["rows"]
    ]
    title = (
        f"{WORKLOADS[cell['workload']][0]}: n = {cell['time']}, batch {cell['batch']}, {cell['precision']}; "
        f"fastest matrix product {cell['matrix_peak'] / 1e9:,.0f} GFLOP/s"
    )
    aligned = ("left", "right", "left", *["right"] * 7, *["left"] * 3)
    table = tabulate(lines, headers, tablefmt="github", disable_numparse=True, colalign=aligned)
    left_out = [f"left out: {name} ({reason})" for name, reason in cell["left_out"].items()]
    return "\n".join([f"{title}\n\n{table}", *left_out])


def causal_table(rows: list[dict[str, Any]]) -> str:
    """In the form of PAR Transformer's Table 6."""
    (baseline,) = rows[0]["against"]
    headers = ["model", "pattern", "precision", "T, M", "parameters", "GFLOPs", "ms", "of peak", f"x {baseline}"]
    lines = [
        [
            row["model"],
            f"`{row['pattern']}`",
            row["precision"],
            f"{row['tgt_len']}, {row['mem_len']}",
            f"{row['parameters']:,}",
            f"{row['flops'] / 1e9:,.3g}",
            milliseconds(row["seconds"]),
            f"{row['share_of_peak']:.0%}",
            f"{row['against'][baseline]['speedup']:.2f}, limit {row['against'][baseline]['limit']:.2f}",
        ]
        for row in rows
    ]
    aligned = ("left", "left", "left", *["right"] * 6)
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True, colalign=aligned)


def back_end_of(row: dict[str, Any]) -> str:
    """Its name, and for auto what it chose; other libraries' models have no back end with a name here."""
    return f"auto: {', '.join(row['back_end_used'])}" if row["back_end"] == "auto" else row["back_end"]


def milliseconds(seconds: dict[str, Any]) -> str:
    """Median with quartiles."""
    median, low, high = (1000 * seconds[key] for key in ("median", "low", "high"))
    digits = 0 if low >= 100 else 1 if low >= 10 else 2
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _speedup(row: dict[str, Any], baseline: str) -> str:
    beside = row["against"].get(baseline)
    if beside is None:
        return "not measured"
    kernel = f", {beside['back_end']}" if baseline == OURS else ""
    spread = f"{beside['low']:.2f} to {beside['high']:.2f}"
    return f"{beside['speedup']:.2f} ({spread}), limit {beside['limit']:.2f}{kernel}"


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
    flat |= {f"seconds_{key}": row["seconds"][key] for key in ("median", "low", "high")}
    for name, beside in row["against"].items():
        flat |= {f"{key} against {name}": value for key, value in beside.items()}
    return flat


def write_csv(results: dict[str, Any], path: Path) -> None:
    """Every row of every cell as one line; columns that a row lacks stay empty."""
    rows = list(csv_rows(results))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
