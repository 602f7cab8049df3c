#!/usr/bin/env python
"""Check the selections of ``--attention-backend auto`` on this machine, first idle and then with one busy core.

For each of 12 attention calls, `auto` selects a back end with an empty cache. Then all candidate back ends are timed
alternately. The time of the selected back end relative to the fastest one should have a median of at most 1.02, and a
95th percentile of at most 1.10.
"""

import multiprocessing
import os
import tempfile
from itertools import product

import numpy as np
import torch

from lazyformer_fairseq.evaluation.costs.latency import measure
from lazyformer_fairseq.modules import timing
from lazyformer_fairseq.modules.attention import AttentionCall, AttentionInputs, selection
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.attention.selection import AUTO, BackEndSelector, Workload, fixed_order
from lazyformer_fairseq.report.tables import markdown_table

TIMES = (128, 512, 1024)
PRECISIONS = (torch.float32, torch.bfloat16)
CONSUMERS = (0, 1)
TOKENS = 2048
HEADS = 12
HEAD_SIZE = 64
ROUNDS = 15


def check(time: int, precision: torch.dtype, consumers: int) -> tuple[str, str, float]:
    """Return the selected back end for a call, the fastest one, and the ratio of their times."""
    timing.SELECTOR.__init__()  # reset in place, because the matmuls within back ends use the same selector
    timing.SELECTOR.time_at_once()
    shape = (max(1, TOKENS // time), time, 3, HEADS, HEAD_SIZE)
    q, k, v = (part.transpose(1, 2) for part in torch.randn(shape, dtype=precision).requires_grad_().unbind(2))
    given = AttentionInputs(q, k, v, Scores(), consumers=consumers)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LAZYFORMER_CACHE"] = folder
        selected = BackEndSelector(AUTO, attentions=1)(given)
    workload = Workload(AttentionCall.of(given), "cpu", precision, attentions=1)
    prepare = selection._prepare(workload, given)
    timings = measure({name: prepare(name) for name in fixed_order(workload)}, rounds=ROUNDS)
    fastest = min(timings, key=lambda name: timings[name].median)
    return selected, fastest, timings[selected].median / timings[fastest].median


def keep_busy() -> None:
    """Multiply matrices on one core forever."""
    torch.set_num_threads(1)
    matrix = torch.ones(256, 256)
    while True:
        torch.mm(matrix, matrix)


def main() -> None:
    """Print a table of all calls, with the median and the 95th percentile for each condition."""
    for beside in ("nothing", "a busy core"):
        burner = multiprocessing.get_context("spawn").Process(target=keep_busy, daemon=True)
        if beside != "nothing":
            burner.start()
        rows = []
        for time, precision, consumers in product(TIMES, PRECISIONS, CONSUMERS):
            selected, fastest, ratio = check(time, precision, consumers)
            name = f"{time} tokens, {str(precision).removeprefix('torch.')}, {consumers} consumers"
            rows.append({"attention": name, "selected": selected, "fastest": fastest, "ratio": round(ratio, 3)})
        ratios = [row["ratio"] for row in rows]
        print(markdown_table(rows))
        print(f"beside {beside}: median {np.median(ratios):.3f}, 95th percentile {np.quantile(ratios, 0.95):.3f}\n")
        if beside != "nothing":
            burner.terminate()


if __name__ == "__main__":
    main()
