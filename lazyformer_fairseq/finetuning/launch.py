"""A grid is run from the command line: everything is checked first, then it runs to its end, or to a Ctrl-C."""

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn, Optional

import click

from lazyformer_fairseq.data.text.load_tokenizer import find_tokenizer_folder
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.benchmark import Benchmark
from lazyformer_fairseq.finetuning.checkpoints import StartModel, load_start_models, name_checkpoints
from lazyformer_fairseq.finetuning.executors import Cluster, Workers, choose_executor, choose_precision
from lazyformer_fairseq.finetuning.grid import Grid
from lazyformer_fairseq.finetuning.queue import RunQueue
from lazyformer_fairseq.finetuning.settings import SPECIAL_OPTIONS, GridSettings, Preparation, Sizes

PREPARING = tuple(one.name for one in fields(Sizes))  # options that mean something where data is prepared


def grid_and_executor(benchmark: Benchmark, given: GridSettings) -> tuple[Grid, Workers | Cluster]:
    """The grid that a user asks for, and where its runs go; what is missing of the data is prepared.

    Raises:
        UserError: a task that is not prepared or not whole, a checkpoint that does not load or does not belong to the
            data, options that do not fit together.
    """
    _refuse_options_of_others(benchmark, given)
    if given.protocol and given.protocol not in benchmark.protocols:
        raise UserError(f"--protocol {given.protocol}: {benchmark.name} has {', '.join(benchmark.protocols)}")
    protocol = benchmark.protocols[given.protocol] if given.protocol else benchmark.usual
    names = benchmark.choose_tasks(given.tasks or protocol.tasks)
    starts = benchmark.starts(given, names)
    epochs = choose_epochs(benchmark, names, given.epochs or protocol.epochs, given.task_epochs)
    checkpoints = name_checkpoints(given.checkpoints)
    executor = choose_executor(given, f"lazyformer-{benchmark.key}")
    if given.data:
        models = _prepare(benchmark, given, names, checkpoints)
    prepared = benchmark.load(given.prepared or given.output / benchmark.prepared_in, names)
    if not given.data:
        models = load_start_models(checkpoints, next(iter(prepared.values())).tokenizer_folder)
    if not benchmark.cuts_inputs:
        refuse_short_models(models, max(folder.longest for folder in prepared.values()))
    grid = Grid(
        benchmark=benchmark,
        output=given.output,
        models=models,
        tasks=prepared,
        lrs=given.lrs or protocol.lrs,
        seeds=given.seeds or protocol.seeds,
        epochs=epochs,
        precision=choose_precision(given),
        max_train_rows=given.max_train_rows,
        batch_size=given.batch_size or protocol.batch_size,
        warmup_ratio=protocol.warmup if given.warmup_ratio is None else given.warmup_ratio,
        starts=starts,
        own=benchmark.own_settings(given, prepared),
    )
    for run in grid.runs:
        run.result()  # refuses one of other settings
    return grid, executor


def _refuse_options_of_others(benchmark: Benchmark, given: GridSettings) -> None:
    for name, nothing in SPECIAL_OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        if getattr(given, name) != nothing:
            if name not in benchmark.options:
                raise UserError(f"{option}: means nothing for {benchmark.name}")
            if name in PREPARING and not given.data:
                raise UserError(f"{option}: means something with --data alone")


def choose_epochs(benchmark: Benchmark, names: Sequence[str], of_all: int, of_some: Sequence[str]) -> dict[str, int]:
    """Task -> epochs, from ``--epochs`` and ``--task-epochs TASK=N``."""
    epochs = dict.fromkeys(names, of_all)
    for text in of_some:
        name, _, number = text.partition("=")
        if not number.isdigit() or int(number) < 1:
            raise UserError(f"--task-epochs {text}: give TASK=N, as in {names[0]}=3")
        (name,) = benchmark.choose_tasks([name])
        if name not in epochs:
            raise UserError(f"--task-epochs {text}: the task is not among --tasks")
        epochs[name] = int(number)
    return epochs


def _prepare(
    benchmark: Benchmark, given: GridSettings, names: Sequence[str], checkpoints: Mapping[str, Path]
) -> list[StartModel]:
    """Reads the models first, which takes less time; then prepares the data, or finds it prepared."""
    if given.prepared:
        raise UserError("--data and --prepared: give one of them")
    tokenizer = find_tokenizer_folder(given.tokenizer or next(iter(checkpoints.values())).parent)
    models = load_start_models(checkpoints, tokenizer)
    sizes = {name: getattr(given, name) for name in PREPARING}
    wanted = Preparation(data=given.data, tokenizer=tokenizer, output=given.output, tasks=tuple(names), **sizes)
    if (longest := benchmark.longest_input(wanted)) is not None:
        refuse_short_models(models, longest)
    click.echo(benchmark.prepare(wanted))
    return models


def refuse_short_models(models: Sequence[StartModel], longest: int) -> None:
    """Raises a UserError for a model that has fewer positions than inputs have tokens."""
    for model in models:
        if model.max_positions < longest:
            raise UserError(
                f"{model.checkpoint}: has {model.max_positions} positions, but inputs have up to {longest} tokens; "
                f"prepare them with --max-length {model.max_positions} (and a --stride below that), in a folder of "
                "their own"
            )


def run_to_the_end(benchmark: Benchmark, given: GridSettings) -> NoReturn:
    """Prepares and runs a grid, prints its report, and ends the process: 0; 1 where runs failed; 130 when stopped.

    Raises:
        UserError: whatever :func:`grid_and_executor` raises, or another queue is at work on the folder.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    queue: Optional[RunQueue] = None
    try:
        grid, executor = grid_and_executor(benchmark, given)
        queue = RunQueue(grid, executor, given.keep_checkpoints)
        queue.run()
    except KeyboardInterrupt:
        done = f"{len(queue.results)} of {len(grid.runs)} runs are finished" if queue else "nothing has run yet"
        click.echo(f"stopped: {done}; rerun to resume", err=True)
        sys.exit(130)
    click.echo(f"{grid.output / 'runs'}: {len(queue.results)} of {len(grid.runs)} runs are finished")
    for failed, message in queue.failed.items():
        click.echo(f"failed: {failed.name}: {message}", err=True)
    if queue.failed:
        click.echo("the same command tries what failed again", err=True)
    if queue.results:
        from lazyformer_fairseq.finetuning.report import write_report  # loads matplotlib

        click.echo(
            f"\n{write_report(grid.output, grid.output / 'report', benchmark)}\nwritten to {grid.output / 'report'}"
        )
    sys.exit(1 if queue.failed else 0)
