"""The commands ``lazyformer glue prepare`` and ``lazyformer glue run``."""

import os
import signal
import sys
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.existing_paths import ExistingPath
from lazyformer_fairseq.glue.report.paper_table import LEARNING_RATES, SEEDS
from lazyformer_fairseq.glue.run.named_checkpoints import name_checkpoints
from lazyformer_fairseq.several_values import CommandWithSeveralValues, divided, numbers

A_PATH = click.Path(path_type=Path)
THERE = ExistingPath()


def _named_checkpoints(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    return name_checkpoints(values)


@click.group()
def glue() -> None:
    """From pre-trained checkpoints to the paper's GLUE table. `run` does all of it but the submission files."""


@glue.command(cls=CommandWithSeveralValues)
@click.option("--data", type=THERE, required=True, help="Folder of the official download, CoLA/train.tsv and so on.")
@click.option("--tokenizer", type=THERE, required=True, help="The pre-training's: its folder, or a checkpoint's.")
@click.option("--output", type=A_PATH, required=True, help="Tasks go to OUTPUT/tasks.")
@click.option("--tasks", multiple=True, callback=divided, help="Names of tasks.  [default: all that are in DATA]")
@click.option("--max-length", type=click.IntRange(5), default=512, help="Longer inputs are cut to so many tokens.")
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: the cores]")
def prepare(
    data: Path, tokenizer: Path, output: Path, tasks: tuple[str, ...], max_length: int, workers: Optional[int]
) -> None:
    """Turn GLUE's files into what is trained on, with the tokenizer of pre-training.

    Each task gets a manifest.json with its rows, what was cut, what was unknown, and the hashes of its files.
    A second time, what is there and unchanged is reused.
    """
    from lazyformer_fairseq.data.glue.task_table import find_task
    from lazyformer_fairseq.glue import prepare as steps

    wanted = steps.Preparation(
        data, steps.find_tokenizer_folder(tokenizer), output, max_length, workers or len(os.sched_getaffinity(0))
    )
    chosen = {task.name: task for task in map(find_task, tasks)}
    prepared = steps.prepare_tasks(wanted, list(chosen.values()) or steps.tasks_present(data))
    click.echo(steps.overview(prepared))


@glue.command(cls=CommandWithSeveralValues)
@click.option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    required=True,
    callback=_named_checkpoints,
    metavar="[NAME=]FILE...",
    help="Pre-trained models. NAME is the row's in the table; without one it is the name of the file's folder.",
)
@click.option("--output", type=A_PATH, required=True, help="Tasks, runs and report go into this folder.")
@click.option("--prepared", type=THERE, help="Prepared tasks, in place of --data.  [default: OUTPUT/tasks]")
@click.option("--data", type=THERE, help="Official download; what is not prepared yet goes to OUTPUT/tasks.")
@click.option("--tokenizer", type=THERE, help="For --data.  [default: beside the first checkpoint]")
@click.option("--tasks", multiple=True, callback=divided, help="Names of tasks.  [default: the eight of the paper]")
@click.option("--lrs", multiple=True, type=str, callback=numbers(float), default=LEARNING_RATES, help="Learning rates.")
@click.option("--seeds", multiple=True, type=str, callback=numbers(int), default=SEEDS, help="Each at each rate.")
@click.option("--epochs", type=click.IntRange(1), help="Epochs of every task.  [default: 10]")
@click.option(
    "--task-epochs",
    multiple=True,
    callback=divided,
    metavar="TASK=N...",
    help="Epochs of some tasks, as in MNLI=3 QQP=3.",
)
@click.option("--from-mnli", is_flag=True, help="RTE, MRPC and STS-B start from the model's best MNLI run.")
@click.option("--max-train-rows", type=click.IntRange(1), help="Train on so many rows of a task, all runs on the same.")
@click.option(
    "--keep-checkpoints",
    type=click.Choice(["none", "best", "all"]),
    default="best",
    help="Fine-tuned models to keep: of no run, of the best of each model and task, of each run.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help="[default: bf16 where the GPUs of this machine have it, else fp16; without GPUs fp32]",
)
@click.option("--gpus", help="As CUDA_VISIBLE_DEVICES, or 'none' for the CPU.  [default: all]")
@click.option(
    "--workers", type=click.IntRange(1), help="Runs at a time.  [default: as many as GPUs, else cores / threads]"
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    default=1,
    help="Of a run on a CPU. Equal seeds and equal threads give equal results, to the last digit.",
)
@click.option(
    "--executor",
    type=click.Choice(["processes", "slurm", "submitit-local"]),
    default="processes",
    help="Where runs go: to this machine, to Slurm as an array, to submitit's processes (to try that).",
)
@click.option(
    "--slurm",
    multiple=True,
    metavar="NAME=VALUE...",
    callback=divided,
    help="submitit's parameters, such as slurm_partition=gpu gpus_per_node=1 timeout_min=600.",
)
def run(**given: Any) -> None:
    """Fine-tune every model on every task at every rate with every seed (LazyFormer's Table 5), and report.

    What is missing of the data is prepared first. One run a GPU, or several on the CPU's cores, each with a folder of
    its own and a result.json in it. At the end comes the paper's table, printed and, with pictures, in OUTPUT/report.
    Stop it at any time; rerun to resume: finished runs are not repeated.
    """
    from lazyformer_fairseq.glue.report.grid_report import write_report
    from lazyformer_fairseq.glue.run.door import grid_and_executor
    from lazyformer_fairseq.glue.run.queue import RunQueue

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    queue: Optional[RunQueue] = None
    try:
        grid, executor = grid_and_executor(given)
        queue = RunQueue(grid, executor, given["keep_checkpoints"])
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
        click.echo(f"\n{write_report(grid.output, grid.output / 'report')}\nwritten to {grid.output / 'report'}")
    sys.exit(1 if queue.failed else 0)
