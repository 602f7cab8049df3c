"""``lazyformer corpus bench``: the cost of a corpus, by step; with 1 worker and with more, in turn."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Optional

from lazyformer_fairseq.corpus.build import MEGABYTE, build_corpus
from lazyformer_fairseq.corpus.executors import ExecutorSettings
from lazyformer_fairseq.corpus.readers.inputs import find_inputs
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.report.tables import markdown_table, write_csv

Timings = dict[int, list[dict[str, Any]]]


def run_bench(
    inputs: Sequence[str], settings: CorpusSettings, workers: Sequence[int], repeats: int, csv_file: Optional[Path]
) -> str:
    """Builds a corpus ``repeats`` times with each number of workers, in turn, in a temporary folder.

    Returns:
        two tables: core-seconds by step, and the cost of the whole.
    """
    input_bytes = sum(file.size for file in find_inputs(inputs, settings.bad_files))
    timings: Timings = {count: [] for count in workers}
    for _ in range(repeats):
        for count in workers:
            with tempfile.TemporaryDirectory(prefix="lazyformer-corpus-bench-") as folder:
                manifest = build_corpus(inputs, Path(folder) / "out", settings, ExecutorSettings(workers=count))
            timings[count].append(manifest["timing"])
    steps, wholes = step_rows(timings), whole_rows(timings, input_bytes)
    if csv_file:
        write_csv([*wholes, *steps], csv_file)
    return "\n\n".join(markdown_table(rows) for rows in (steps, wholes))


def step_rows(timings: Timings) -> list[dict[str, Any]]:
    """Median core-seconds of each step, and its megabytes of extracted text per second."""
    first = next(iter(timings.values()))[0]
    rows = []
    for step in first["steps"]:
        seconds = [median(timing["steps"][step] for timing in runs) for runs in timings.values()]
        of_workers = {f"core-seconds, {n} workers": f"{s:.2f}" for n, s in zip(timings, seconds, strict=True)}
        rows.append({"step": step, **of_workers, "MB/s": f"{first['megabytes'] / (seconds[0] or float('inf')):.2f}"})
    return rows


def whole_rows(timings: Timings, input_bytes: int) -> list[dict[str, Any]]:
    """A row for each number of workers: medians, with the range of the rates."""
    rows = []
    base_workers, base_runs = next(iter(timings.items()))
    base = base_workers * median(run["seconds"] for run in base_runs)
    for count, runs in timings.items():
        rates = sorted(run["megabytes_per_core_second"] for run in runs)
        seconds = median(run["seconds"] for run in runs)
        core_seconds = median(sum(stage["core_seconds"] for stage in run["stages"]) for run in runs)
        memory = max(stage["peak_memory_bytes"] for run in runs for stage in run["stages"])
        rows.append(
            {
                "workers": count,
                "MB of text": f"{runs[0]['megabytes']:.2f}",
                "seconds": f"{seconds:.2f}",
                "core-seconds": f"{core_seconds:.2f}",
                "MB per core-second (range)": f"{median(rates):.2f} ({rates[0]:.2f} to {rates[-1]:.2f})",
                "scaling": f"{base / (count * seconds):.0%}",
                "memory of a task, MB": f"{memory / MEGABYTE:.2f}",
                "disk / input": f"{max(run['peak_disk_bytes'] for run in runs) / input_bytes:.2f}",
            }
        )
    return rows
