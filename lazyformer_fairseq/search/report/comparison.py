"""A search's final output: files for a program, pictures and a table for a reader."""

from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from lazyformer_fairseq.costs.flops import count_flops
from lazyformer_fairseq.costs.latency import Timing
from lazyformer_fairseq.patterns.grammar import count_kinds
from lazyformer_fairseq.search.latency.measure import measure_models
from lazyformer_fairseq.search.report.found_pattern import compact, letters
from lazyformer_fairseq.search.supernet.fairseq_model import FairseqSearch

COSTS = ("parameters", "GFLOPs", "latency, ms (quartiles)", "latency")


def compare_with_baseline(search: FairseqSearch, chosen: list[str]) -> list[dict[str, Any]]:
    """Sizes and speed of the baseline and of the found pattern, as rows; measured in turn.

    FLOPs and latency are of one forward pass at batch 1 over ``latency_tokens`` and ``latency_memory``.
    """
    patterns = {"baseline": search.settings.baseline}
    if found := letters(chosen):
        patterns["found"] = found
    timings = measure_models(search, patterns)
    return [_row(search, name, pattern, timings) for name, pattern in patterns.items()]


def _row(search: FairseqSearch, name: str, pattern: str, timings: Mapping[str, Timing]) -> dict[str, Any]:
    model, network = search.build_model(pattern)
    lower, upper = timings[name].quartiles
    # Count an encoder's head for one prediction only: downstream tasks have no masked-LM head.
    predicted = 1 if search.settings.task == "masked-lm" else None
    return {
        "name": name,
        "pattern": compact(pattern),
        "sublayers": count_kinds(pattern),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops": count_flops(pattern, network.sizes, search.latency_tokens, search.latency_memory, predicted=predicted),
        "latency_ms": 1000 * timings[name].median,
        "latency_ms_quartiles": [1000 * lower, 1000 * upper],
        "latency_of_baseline": timings[name].median / timings["baseline"].median,
    }


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Rows of :func:`compare_with_baseline`."""
    cells = [
        [
            row["name"],
            f"`{row['pattern']}`",
            *row["sublayers"].values(),
            f"{row['parameters']:,}",
            f"{row['flops'] / 1e9:.3g}",
            "{:.2f} ({:.2f} to {:.2f})".format(row["latency_ms"], *row["latency_ms_quartiles"]),
            f"{row['latency_of_baseline']:.0%}",
        ]
        for row in rows
    ]
    headers = ("", "pattern", *rows[0]["sublayers"], *COSTS)
    align = ("left", "left", *["right"] * (len(headers) - 2))
    return tabulate(cells, headers, tablefmt="github", disable_numparse=True, colalign=align)
