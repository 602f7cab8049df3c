"""Checks everything for ``lazyformer glue run`` before anything trains, and reads its options."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

import click

from lazyformer_fairseq.data.glue.prepared_data import PreparedTask
from lazyformer_fairseq.data.glue.task_table import TaskDescription, find_task
from lazyformer_fairseq.data.text.load_tokenizer import find_tokenizer_folder
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.glue.prepare import Preparation, overview, prepare_tasks
from lazyformer_fairseq.finetuning.glue.protocols import PROTOCOLS
from lazyformer_fairseq.finetuning.glue.report.paper_table import PAPER_TASKS
from lazyformer_fairseq.finetuning.glue.run.grid import Grid
from lazyformer_fairseq.finetuning.run.cluster import Cluster
from lazyformer_fairseq.finetuning.run.executor import choose_executor, choose_precision
from lazyformer_fairseq.finetuning.run.start_models import StartModel, load_start_models
from lazyformer_fairseq.finetuning.run.workers import Workers


def grid_and_executor(given: Mapping[str, Any]) -> tuple[Grid, Union[Workers, Cluster]]:
    """The grid that the options of the command line ask for, and where its runs go.

    Raises:
        UserError: a task that is not prepared or not whole, a checkpoint that does not load or does not belong to the
            data, options that do not fit together.
    """
    protocol = PROTOCOLS[given["protocol"]]
    tasks = choose_tasks(given["tasks"] or protocol.tasks, given["from_mnli"])
    epochs = choose_epochs(tasks, given["epochs"] or protocol.epochs, given["task_epochs"])
    executor = choose_executor(given, "lazyformer-glue")
    checkpoints = given["checkpoints"]
    if given["data"]:
        models = _prepare(given, tasks, checkpoints)
    prepared = load_prepared(given["prepared"] or given["output"] / "tasks", tasks)
    if not given["data"]:
        models = load_start_models(checkpoints, next(iter(prepared.values())).tokenizer_folder)
    grid = Grid(
        given["output"],
        models,
        prepared,
        given["lrs"] or protocol.lrs,
        given["seeds"] or protocol.seeds,
        epochs,
        choose_precision(given),
        given["max_train_rows"],
        given["from_mnli"],
        *choose_head(given["glue_head"], given["pooler_dropout"]),
        batch_size=given["batch_size"] or protocol.batch_size,
        warmup_ratio=protocol.warmup if given["warmup_ratio"] is None else given["warmup_ratio"],
    )
    for run in grid.runs:
        run.result()  # refuses one of other settings
    return grid, executor


def choose_tasks(names: tuple[str, ...], from_mnli: bool = False) -> list[TaskDescription]:
    """Raises a UserError for a task that is unknown, given twice, or cannot be trained."""
    tasks = [find_task(name) for name in names or PAPER_TASKS]
    for number, task in enumerate(tasks):
        if task in tasks[:number]:
            raise UserError(f"--tasks: {task.name} is there twice")
        if "train" not in task.splits:
            raise UserError(f"--tasks: {task.name} has no training data; it is predicted with {task.model_of}'s model")
    if from_mnli and "MNLI" not in [task.name for task in tasks]:
        raise UserError("--from-mnli: MNLI is not among --tasks, so there is nothing to start from")
    return tasks


def choose_epochs(tasks: list[TaskDescription], of_all: Optional[int], of_some: tuple[str, ...]) -> dict[str, int]:
    """Task -> epochs, from ``--epochs`` and ``--task-epochs TASK=N``."""
    epochs = {task.name: of_all or task.epochs for task in tasks}
    for text in of_some:
        name, _, number = text.partition("=")
        if not number.isdigit() or int(number) < 1:
            raise UserError(f"--task-epochs {text}: give TASK=N, as in MNLI=3")
        if find_task(name).name not in epochs:
            raise UserError(f"--task-epochs {text}: the task is not among --tasks")
        epochs[find_task(name).name] = int(number)
    return epochs


def choose_head(kind: str, dropout: Optional[float]) -> tuple[Optional[str], Optional[float]]:
    """Kind and dropout of the classification head, None for a default; a linear one's dropout is 0.1, as published."""
    if kind == "dense":
        return None, dropout
    return kind, 0.1 if dropout is None else dropout


def load_prepared(folder: Path, tasks: list[TaskDescription]) -> dict[str, PreparedTask]:
    """Task -> its prepared data, in the order of `tasks`.

    Raises:
        UserError: one is missing, lacks what training needs, or was prepared with another tokenizer than the first.
    """
    missing = [task.name for task in tasks if not PreparedTask.is_at(folder / task.name)]
    if missing:
        raise UserError(
            f"{folder}: {', '.join(missing)} not prepared; run `lazyformer glue prepare`, or name the tasks you want, "
            "as in --tasks CoLA RTE"
        )
    found = {task.name: PreparedTask.load(folder / task.name) for task in tasks}
    first = next(iter(found.values()))
    for name, prepared in found.items():
        if prepared.manifest["tokenizer"] != first.manifest["tokenizer"]:
            raise UserError(f"{folder}: {name} was prepared with another tokenizer than {first.task.name}")
        for split in prepared.task.splits:
            if not split.startswith("test"):
                prepared.read(split, None, 0)
    return found


def _prepare(
    given: Mapping[str, Any], tasks: list[TaskDescription], checkpoints: Mapping[str, Path]
) -> list[StartModel]:
    """Reads the models first, which takes less time; then prepares the tasks, or finds them prepared."""
    if given["prepared"]:
        raise UserError("--data and --prepared: give one of them")
    tokenizer = find_tokenizer_folder(given["tokenizer"] or next(iter(checkpoints.values())).parent)
    models = load_start_models(checkpoints, tokenizer)
    wanted = Preparation(given["data"], tokenizer, given["output"], processes=len(os.sched_getaffinity(0)))
    click.echo(overview(prepare_tasks(wanted, tasks)))
    return models
