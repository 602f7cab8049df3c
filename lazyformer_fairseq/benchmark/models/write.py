"""Runs a benchmark, from its settings to the files in its folder."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lazyformer_fairseq.benchmark.models.report import tables, write_csv
from lazyformer_fairseq.benchmark.models.run import run_bench
from lazyformer_fairseq.benchmark.models.settings import BenchSettings
from lazyformer_fairseq.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.files.json_files import read_json, write_json
from lazyformer_fairseq.files.whole import refuse_filled_folder, whole_folder

RESULTS = "results.json"


def bench_to(folder: Path, settings: BenchSettings, command: Sequence[str]) -> str:
    """Measures, writes `results.json`, `results.csv`, `results.md` and pictures, and returns the tables.

    Args:
        folder: created, complete, after all measurements.
        settings: what to measure.
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
        "settings": settings.as_json(),
        **run_bench(settings),
    }
    text = tables(results)
    with whole_folder(folder) as unfinished:
        write_json(unfinished / RESULTS, results)
        write_csv(results, unfinished / "results.csv")
        facts = {"command": f"`{results['command']}`", **results["machine"], **results["versions"]}
        described = "\n".join(f"- {name}: {value}" for name, value in facts.items())
        (unfinished / "results.md").write_text(f"{described}\n\n{text}\n", encoding="utf-8")
        _draw(results, unfinished)
    return text


def _draw(results: dict[str, Any], folder: Path) -> None:
    """Draws pictures, except on a machine without matplotlib, such as one borrowed for a measurement."""
    try:
        from lazyformer_fairseq.benchmark.models.pictures import draw_all
    except ModuleNotFoundError as error:
        print(f"left out: pictures ({error}); where it is installed: lazyformer bench draw FOLDER", file=sys.stderr)
    else:
        draw_all(results, folder)


def draw_again(folder: Path) -> list[str]:
    """Draws the pictures of a folder from its `results.json`; returns their names.

    Raises:
        UserError: there is no such file.
    """
    from lazyformer_fairseq.benchmark.models.pictures import draw_all

    if not (folder / RESULTS).is_file():
        raise UserError(f"{folder}: has no {RESULTS}; give a folder that lazyformer bench wrote")
    return draw_all(read_json(folder / RESULTS), folder)
