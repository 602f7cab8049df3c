"""A row of the results: an entry's measurements, and how they compare with each baseline."""

from typing import Any

import numpy as np

from lazyformer_fairseq.measure.bench.models.contenders import predicted_words
from lazyformer_fairseq.measure.bench.models.entries import BASELINES, OURS, Entry
from lazyformer_fairseq.measure.bench.models.workloads import WORKLOADS, Cell
from lazyformer_fairseq.measure.costs.flops import makers_of_blocks
from lazyformer_fairseq.measure.costs.latency import Timing
from lazyformer_fairseq.report.numbers import spread


def describe(entry: Entry, cell: Cell, timing: Timing, memory: int, peak: float) -> dict[str, Any]:
    """The measurements, and what follows from them; `flops` are those that this back end performs.

    Args:
        memory: peak bytes.
        peak: FLOP/s of the fastest matrix product in the same rounds.
    """
    training = WORKLOADS[cell.workload][1]
    predicted = predicted_words(cell.batch, cell.time) if cell.workload == "training" else 0
    flops = entry.count_flops(cell.batch, cell.time, training, predicted)
    used = entry.back_end_used(cell.batch, cell.time, training)
    return {
        "model": entry.model,
        "pattern": entry.contender.pattern,
        "sizes": [getattr(entry.contender.sizes, name) for name in ("ffn_embed_dim", "embed_dim", "num_heads")],
        "back_end": entry.back_end,
        "back_end_used": sorted({used(maker) for maker in makers_of_blocks(entry.contender.pattern)}),
        "buckets": entry.buckets,
        "baseline": entry.baseline,
        "parameters": entry.contender.parameters,
        "flops": flops,
        "seconds": timing.as_json(),
        "tokens_per_second": cell.batch * cell.time / timing.median,
        "flops_per_second": flops / timing.median,
        "share_of_peak": flops / timing.median / peak,
        "memory_bytes": memory,
    }


def add_speedups(rows: list[dict[str, Any]]) -> None:
    """Adds `against` to each row of a cell: how the row compares with each baseline, by name.

    `speedup` is the ratio of the medians, `low` and `high` the quartiles of the `n` ratios round by round, `limit` the
    ratio of the FLOPs, `memory` that of the memory (below 1: less). Our own BERT runs on its fastest back end,
    `back_end`, with the row's own relative bias; the others have none.
    """
    for row in rows:
        row["against"] = {}
        for name in BASELINES:
            candidates = [other for other in rows if other["baseline"] == name]
            if name == OURS:
                candidates = [other for other in candidates if other["buckets"] == row["buckets"]]
            if candidates:
                row["against"][name] = _beside(row, min(candidates, key=lambda other: other["seconds"]["median"]))


def _beside(row: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    ratios = spread(np.divide(baseline["seconds"]["samples"], row["seconds"]["samples"]))
    return {
        **ratios,
        "speedup": baseline["seconds"]["median"] / row["seconds"]["median"],
        "limit": baseline["flops"] / row["flops"],
        "memory": row["memory_bytes"] / baseline["memory_bytes"],
        "back_end": baseline["back_end"],
    }
