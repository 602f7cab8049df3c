"""``lazyformer corpus bench``: the cost of a corpus, by step; with 1 worker and with more, in turn."""

import csv
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Optional

from tabulate import tabulate

from lazyformer_fairseq.corpus.build import MEGABYTE, build_corpus
from lazyformer_fairseq.corpus.executors import ExecutorSettings
from lazyformer_fairseq.corpus.readers.inputs import find_inputs
from lazyformer_fairseq.corpus.settings import CorpusSettings

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
        with csv_file.open("w", newline="") as file:
            csv.writer(file).writerows([*wholes, *steps])
    return "\n\n".join(tabulate(rows[1:], rows[0], tablefmt="github", floatfmt=".2f") for rows in (steps, wholes))


def step_rows(timings: Timings) -> list[list[Any]]:
    """Median core-seconds of each step, and its megabytes of extracted text per second; the first row is the header."""
    first = next(iter(timings.values()))
    megabytes = first[0]["megabytes"]
    rows: list[list[Any]] = [["step", *(f"core-seconds, {count} workers" for count in timings), "MB/s"]]
    for step in first[0]["steps"]:
        medians = [median(timing["steps"][step] for timing in runs) for runs in timings.values()]
        rows.append([step, *medians, megabytes / medians[0] if medians[0] else None])
    return rows


def whole_rows(timings: Timings, input_bytes: int) -> list[list[Any]]:
    """A row for each number of workers: medians, with the range of the rates."""
    header = ["workers", "MB of text", "seconds", "core-seconds", "MB per core-second (range)", "scaling"]
    rows: list[list[Any]] = [[*header, "memory of a task, MB", "disk / input"]]
    base_workers, base_runs = next(iter(timings.items()))
    base = base_workers * median(run["seconds"] for run in base_runs)
    for count, runs in timings.items():
        rates = sorted(run["megabytes_per_core_second"] for run in runs)
        seconds = median(run["seconds"] for run in runs)
        rows.append(
            [
                count,
                runs[0]["megabytes"],
                seconds,
                median(sum(stage["core_seconds"] for stage in run["stages"]) for run in runs),
                f"{median(rates):.2f} ({rates[0]:.2f} to {rates[-1]:.2f})",
                f"{base / (count * seconds):.0%}",
                max(stage["peak_memory_bytes"] for run in runs for stage in run["stages"]) / MEGABYTE,
                max(run["peak_disk_bytes"] for run in runs) / input_bytes,
            ]
        )
    return rows
