"""Reads and checks the results of a grid of fine-tuning runs in its folder.

OUT/runs/grid.json                            models, tasks, learning rates and seeds that were asked for
OUT/runs/MODEL/TASK/lr2e-05_seed1/result.json   a run that ended well; failed.json where it failed
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.report.results import Failure, Grid, Results, Run, RunKey
from lazyformer_fairseq.finetuning.scored_task import TaskFamily, measured
from lazyformer_fairseq.storage.json_files import read_json

FORMAT_VERSION = 1
_NUMBER = (int, float)
_OPTIONAL = type(None)
_RESULT_FIELDS = {
    "model": (str,),
    "checkpoint": (str,),
    "updates": (int, _OPTIONAL),
    "task": (str,),
    "lr": _NUMBER,
    "seed": (int,),
    "epochs": _NUMBER,
    "metrics": (dict,),
    "baseline": (dict,),
    "train_rows": (int,),
    "rows_in_file": (int, _OPTIONAL),
    "seconds": _NUMBER,
    "started_from": (str, _OPTIONAL),
    "head": (str, _OPTIONAL),
    "head_dropout": (*_NUMBER, _OPTIONAL),
    "baselines": (dict, _OPTIONAL),
    "batch_size": (int, _OPTIONAL),
    "warmup_ratio": (*_NUMBER, _OPTIONAL),
}
_KEY_FIELDS = ("model", "task", "lr", "seed")
_GRID_FIELDS = {"models": (dict,), "tasks": (list,), "lrs": (list,), "seeds": (list,)}
_FAILED_FIELDS = {"message": (str,)}
_RUN_FOLDER = re.compile(r"lr(?P<rate>.+)_seed(?P<seed>\d+)")


def read_results(folder: Path, family: TaskFamily) -> Results:
    """Reads and checks ``folder``/runs.

    Args:
        family: the tasks that the grid may have.

    Raises:
        UserError: no grid; a file that is no JSON, of another format version, or lacks a field; a run that is there
            twice; two runs of a task whose development sets differ.
    """
    runs_folder = folder / "runs"
    grid = read_grid(runs_folder / "grid.json", family)
    runs: dict[RunKey, Run] = {}
    failures: dict[RunKey, Failure] = {}
    for path in sorted(runs_folder.glob("*/*/*/failed.json")):
        key = _key_of_folder(path.parent)
        if key is not None and not (path.parent / "result.json").exists():
            failures[key] = Failure(path.parent, _read_json(path, _FAILED_FIELDS)["message"])
    for path in sorted(runs_folder.glob("*/*/*/result.json")):
        run = read_run(path, family)
        if run.key in runs:
            raise UserError(f"{path}: is the same run as {runs[run.key].folder}; remove one of them")
        runs[run.key] = run
    for key in [key for key, run in runs.items() if _not_a_number(run, family)]:
        run = runs.pop(key)
        failures[key] = Failure(run.folder, f"{_not_a_number(run, family)} is not a number")
    asked = {key for model in grid.models for task in grid.tasks for key in grid.keys_of(model, task)}
    outside_grid = len((runs.keys() | failures.keys()) - asked)
    runs = {key: run for key, run in runs.items() if key in asked}
    failures = {key: failure for key, failure in failures.items() if key in asked}
    _check_same_development_sets(runs, family)
    return Results(folder, family, grid, runs, failures, outside_grid)


def read_grid(path: Path, family: TaskFamily) -> Grid:
    """Raises a UserError where the file is missing, no JSON, or lacks a field."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the folder that `{family.command}` wrote")
    content = _read_json(path, _GRID_FIELDS)
    _check_version(path, content.get("format_version", FORMAT_VERSION))
    for name, kinds in (("tasks", (str,)), ("lrs", _NUMBER), ("seeds", (int,))):
        for value in content[name]:
            _check_kind(path, name, value, kinds)
    return Grid(
        content["models"],
        tuple(_check_task(path, name, family) for name in content["tasks"]),
        tuple(float(rate) for rate in content["lrs"]),
        tuple(content["seeds"]),
    )


def read_run(path: Path, family: TaskFamily) -> Run:
    """Raises a UserError where a result.json is of another format version, lacks a field or metric, names no task."""
    _check_version(path, _read_json(path, {}).get("format_version"))
    content = _read_json(path, _RESULT_FIELDS)
    task = family.tasks[_check_task(path, content["task"], family)]
    for field in ("metrics", "baseline"):
        for split, metric in measured(task):
            _check_kind(path, f"{field}.{split}", content[field].get(split), (dict,))
            _check_kind(path, f"{field}.{split}.{metric}", content[field][split].get(metric), _NUMBER)
    key = RunKey(content["model"], task.name, float(content["lr"]), content["seed"])
    return Run(key, path.parent, **{name: content[name] for name in _RESULT_FIELDS if name not in _KEY_FIELDS})


def _check_version(path: Path, version: Any) -> None:
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {version!r}, but this program reads {FORMAT_VERSION}")


def _read_json(path: Path, fields: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """A JSON object that holds `fields`, each of one of its kinds."""
    content = read_json(path)
    for name, kinds in fields.items():
        if name not in content and _OPTIONAL not in kinds:
            raise UserError(f"{path}: has no field {name!r}; remove it and run the grid again")
        _check_kind(path, name, content.setdefault(name, None), kinds)
    return content


def _check_kind(path: Path, name: str, value: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(f"{path}: field {name!r} is {value!r}, must be {wanted}; remove it and run the grid again")


def _check_task(path: Path, name: str, family: TaskFamily) -> str:
    if name not in family.tasks:
        raise UserError(f"{path}: {name!r} is no {family.name} task; known are {', '.join(family.tasks)}")
    return name


def _key_of_folder(folder: Path) -> Optional[RunKey]:
    """The run that a folder is named after; None for any other name."""
    found = _RUN_FOLDER.fullmatch(folder.name)
    try:
        return found and RunKey(folder.parents[1].name, folder.parent.name, float(found["rate"]), int(found["seed"]))
    except ValueError:
        return None


def _not_a_number(run: Run, family: TaskFamily) -> Optional[str]:
    """The first metric of a run that is infinite or not a number, by split and name."""
    for split, metric in measured(family.tasks[run.key.task]):
        if not math.isfinite(run.metrics[split][metric]):
            return f"{metric} of {split}"
    return None


def _check_same_development_sets(runs: Mapping[RunKey, Run], family: TaskFamily) -> None:
    first: dict[str, Run] = {}
    for run in runs.values():
        other = first.setdefault(run.key.task, run)
        for split, metric in measured(family.tasks[run.key.task]):
            ours, theirs = run.baseline[split][metric], other.baseline[split][metric]
            if not math.isclose(ours, theirs, abs_tol=1e-9):
                raise UserError(
                    f"{run.folder}: its {run.key.task} {split} set is another than that of {other.folder}: the "
                    f"baseline's {metric} is {ours}, not {theirs}. Scores on different rows do not compare: run both "
                    "on the same prepared data"
                )
