"""Which of the aims for a GPU a benchmark reaches: scripts/gpu_bars.py FOLDER, which `lazyformer bench` wrote."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

OURS = "our bert_base"
# (model, n): how many times faster than our bert_base on its fastest back end.
SPEEDUPS = {
    ("lazyformer_m2x6_s", 512): 1.00,
    ("lazyformer_m2x6_s", 4096): 1.05,
    ("lazyformer_m2x6_s", 8192): 1.08,
    ("lazyformer_m6x2_s", 8192): 1.15,
    ("m2x6_w3072", 512): 1.08,
    ("m2x6_w3072", 8192): 1.15,
}
SHARE_OF_PEAK = {512: 0.45}  # of our bert_base
HEADERS = ("aim", "n", "work", "bias", "back end", "measured", "bar", "FLOPs allow", "reached")


def lines_of(results: dict[str, Any]) -> Iterator[tuple]:
    """One line for each aim, workload and bias that was measured."""
    for cell in results["cells"]:
        time = cell["time"]
        for row in cell["rows"]:
            at = (time, cell["workload"], row["buckets"] or "none", row["back_end"])
            beside = row["against"].get(OURS)
            if row["baseline"] == OURS and time in SHARE_OF_PEAK and beside["back_end"] == row["back_end"]:
                share, bar = row["share_of_peak"], SHARE_OF_PEAK[time]
                yield (f"{OURS}: share of the matrix peak", *at, f"{share:.1%}", f"{bar:.0%}", "", _is(share >= bar))
            if row["baseline"] is not None or beside is None:
                continue
            if (row["model"], time) in SPEEDUPS:
                speedup, bar = beside["speedup"], SPEEDUPS[row["model"], time]
                spread = "{low:.3f} to {high:.3f}" if "low" in beside else "n = {n}"  # of few rounds there is none
                measured = f"{speedup:.3f} ({spread.format(**beside)})"
                limit = f"{beside['limit']:.2f}"
                yield (f"{row['model']} x {OURS}", *at, measured, f"{bar:.2f}", limit, _is(speedup >= bar))
            if cell["workload"] != "training":
                continue
            memory = beside["memory"]
            yield (f"{row['model']}: memory / {OURS}'s", *at, f"{memory:.3f}", "1.0", "", _is(memory <= 1))


def _is(reached: bool) -> str:
    return "yes" if reached else "no"


if __name__ == "__main__":
    read = json.loads((Path(sys.argv[1]) / "results.json").read_text())
    print(tabulate(lines_of(read), HEADERS, tablefmt="github", disable_numparse=True))
