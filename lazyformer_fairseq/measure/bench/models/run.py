"""One benchmark, from its settings to the files in its folder.

For each precision, length and workload, all models take turns, round after round.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.bench.models.causal_latency import measure_causal_models
from lazyformer_fairseq.measure.bench.models.entries import Entry, build_entries
from lazyformer_fairseq.measure.bench.models.report import csv_rows, tables
from lazyformer_fairseq.measure.bench.models.rows import add_speedups, describe
from lazyformer_fairseq.measure.bench.models.settings import BenchSettings
from lazyformer_fairseq.measure.bench.models.workloads import Cell, Update, bytes_of, encoder_training, inference
from lazyformer_fairseq.measure.costs.latency import measure
from lazyformer_fairseq.measure.costs.machine import PRECISIONS, describe_machine, describe_versions
from lazyformer_fairseq.measure.costs.matrix_peak import matrix_peak, matrix_products
from lazyformer_fairseq.measure.costs.peak_memory import peak_memory
from lazyformer_fairseq.report.tables import write_csv
from lazyformer_fairseq.storage.atomic import atomic_folder, refuse_filled_folder
from lazyformer_fairseq.storage.json_files import write_json

logger = logging.getLogger(__name__)


def bench_to(folder: Path, settings: BenchSettings, command: Sequence[str]) -> str:
    """Measures, writes `results.json`, `results.csv`, `results.md` and pictures, and returns the tables.

    Args:
        folder: created, complete, after all measurements.
        command: as it was given, for the record.

    Raises:
        UserError: the folder is not empty, or cannot be created.
    """
    refuse_filled_folder(folder)
    torch.manual_seed(1)
    results = {
        "command": " ".join(command),
        "machine": describe_machine(settings.device),
        "versions": describe_versions(),
        "settings": asdict(settings),
        **run_bench(settings),
    }
    text = tables(results)
    with atomic_folder(folder) as unfinished:
        write_json(unfinished / "results.json", results)
        write_csv(list(csv_rows(results)), unfinished / "results.csv")
        facts = {"command": f"`{results['command']}`", **results["machine"], **results["versions"]}
        described = "\n".join(f"- {name}: {value}" for name, value in facts.items())
        (unfinished / "results.md").write_text(f"{described}\n\n{text}\n", encoding="utf-8")
        _draw(results, unfinished)
    return text


def _draw(results: dict[str, Any], folder: Path) -> None:
    """Draws pictures, except on a machine without matplotlib, such as one borrowed for a measurement."""
    try:
        from lazyformer_fairseq.measure.bench.models.pictures import draw_all
    except ModuleNotFoundError as error:
        print(f"left out: pictures ({error}); where it is installed: lazyformer bench draw FOLDER", file=sys.stderr)
    else:
        draw_all(results, folder)


def run_bench(settings: BenchSettings) -> dict[str, Any]:
    """Measures everything. After Ctrl-C, SIGTERM or a GPU error it returns the measurements so far, if any.

    Returns:
        `cells`, each with its `matrix_peak` in FLOP/s, `rows` (see :func:`bench_rows.describe`) and `left_out`, reasons
        by name of what could not run; `causal`, rows of the causal models; `cells_planned`, more than there are if
        the run was stopped.
    """
    planned = len(settings.precisions) * (len(list(_cells(settings, ""))) + bool(settings.causal_archs))
    results: dict[str, Any] = {"cells_planned": planned, "cells": [], "causal": []}
    try:
        _measure_all(settings, results)
    except (KeyboardInterrupt, RuntimeError) as reason:
        if not results["cells"]:
            raise
        if isinstance(reason, RuntimeError):
            logger.error("the benchmark ends here: %s", _in_a_line(reason))
    return results


def _measure_all(settings: BenchSettings, results: dict[str, Any]) -> None:
    """Adds one cell after the other to `results`."""
    begin = time.perf_counter()
    with tqdm(total=results["cells_planned"], desc="benchmark", unit=" cells") as bar:

        def seconds_for_one() -> float | None:
            """The remaining time, shared among the remaining cells."""
            if settings.minutes is None:
                return None
            return max(0.0, 60 * settings.minutes - (time.perf_counter() - begin)) / (bar.total - bar.n)

        for precision in settings.precisions:
            entries = build_entries(settings, precision)
            for cell in _cells(settings, precision):
                results["cells"].append(_measure_cell(cell, entries, settings, seconds_for_one()))
                bar.update()
            del entries
            if settings.causal_archs:
                results["causal"] += measure_causal_models(settings, precision, seconds_for_one())
                bar.update()


def _cells(settings: BenchSettings, precision: str) -> Iterator[Cell]:
    for length in settings.lengths:
        for workload in settings.workloads:
            batch = settings.batch_of(length)
            for size in sorted({1, batch} if workload == "inference" else {batch}):
                yield Cell(workload, precision, length, size)


def _measure_cell(cell: Cell, entries: list[Entry], settings: BenchSettings, seconds: float | None) -> dict[str, Any]:
    things, memory, left_out = _try_out(cell, entries, settings)
    things |= matrix_products(settings.device, PRECISIONS[cell.precision])
    how = {"rounds": settings.rounds, "warm_up": 1, "device": settings.device, "seconds": seconds}
    timings = measure(things, **how, description=str(cell))
    peak = matrix_peak(timings)
    rows = [
        describe(entry, cell, timings[entry.name], memory[entry.name], peak)
        for entry in entries
        if entry.name in memory
    ]
    add_speedups(rows)
    return {**cell.__dict__, "matrix_peak": peak, "rows": rows, "left_out": left_out}


def _try_out(
    cell: Cell, entries: list[Entry], settings: BenchSettings
) -> tuple[dict[str, Callable[[], object]], dict[str, int], dict[str, str]]:
    """Things to call, the bytes that each needs, and why some cannot run; by name of the entry.

    The calls also warm up: here torch and Triton compile and tune kernels.
    """
    things, memory, left_out, shared = {}, {}, {}, {}
    for entry in tqdm(entries, desc=f"{cell}: trying out", leave=False):
        if id(entry.contender) not in shared:
            make = {"training": Update, "encoder": encoder_training, "inference": inference}[cell.workload]
            shared[id(entry.contender)] = make(entry.contender, cell.batch, cell.time)
        thing = shared[id(entry.contender)]
        call = entry.prepared(thing)
        try:
            call()
            highest = peak_memory(call, settings.device)
        except Exception as error:  # a kernel may fail in any way on a GPU that is new to it: the others' figures stay
            left_out[entry.name] = _in_a_line(error)
            continue
        held = thing.held_bytes() if isinstance(thing, Update) else bytes_of(entry.contender.model.parameters())
        things[entry.name], memory[entry.name] = call, held + highest
    return things, memory, left_out


def _in_a_line(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"
