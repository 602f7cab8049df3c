"""A search's final output: files for a program, pictures and a table for a reader."""

from collections.abc import Mapping
from typing import Any

from lazyformer_fairseq.experiments.search.measure import measure_models
from lazyformer_fairseq.experiments.search.report.found_pattern import compact, letters
from lazyformer_fairseq.experiments.search.supernet.fairseq_model import FairseqSearch
from lazyformer_fairseq.measure.costs.flops import count_flops
from lazyformer_fairseq.measure.costs.latency import Timing
from lazyformer_fairseq.patterns.grammar import count_kinds
from lazyformer_fairseq.report.numbers import with_spread
from lazyformer_fairseq.report.tables import markdown_table


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
    seconds = timings[name].as_json()
    # Count an encoder's head for one prediction only: downstream tasks have no masked-LM head.
    predicted = 1 if search.settings.task == "masked-lm" else None
    return {
        "name": name,
        "pattern": compact(pattern),
        "sublayers": count_kinds(pattern),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops": count_flops(pattern, network.sizes, search.latency_tokens, search.latency_memory, predicted=predicted),
        "latency_ms": 1000 * seconds["median"],
        "latency_ms_quartiles": [1000 * seconds["low"], 1000 * seconds["high"]],
        "latency_of_baseline": seconds["median"] / timings["baseline"].median,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of :func:`compare_with_baseline`, in Markdown."""
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
