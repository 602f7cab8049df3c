"""Options that the commands share which run a grid."""

import re
from collections.abc import Callable
from pathlib import Path

import click

from lazyformer_fairseq.arguments import checkpoint_at, divided, precision_option
from lazyformer_fairseq.errors import UserError

MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]*")


def name_checkpoints(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """Callback: model -> checkpoint, from ``NAME=PATH`` or ``PATH`` (named after its folder): a file, or its folder.

    Raises a UserError for a name that is taken or impossible, and where there is no such checkpoint.
    """
    models: dict[str, Path] = {}
    for text in values:
        name, found, given = text.partition("=")
        path = checkpoint_at(Path(given if found else text))
        name = name if found else path.absolute().parent.name
        if not MODEL_NAME.fullmatch(name):
            raise UserError(
                f"--checkpoint {text}: {name!r} cannot name a model's folder; give a name, as in m2x6={path}"
            )
        if name in models:
            raise UserError(
                f"--checkpoint {text}: {models[name]} is called {name} too; give each a name, as in NAME={path}"
            )
        models[name] = path
    return models


def checkpoints_option(command: Callable) -> Callable:
    """The option --checkpoint, as `checkpoints`: name -> file."""
    return click.option(
        "--checkpoint",
        "checkpoints",
        multiple=True,
        required=True,
        callback=name_checkpoints,
        metavar="[NAME=]PATH...",
        help="Pre-trained models: checkpoints, or folders (their best checkpoint, else the last). NAME is the row's in "
        "the table; without one it is the name of the folder.",
    )(command)


def where_runs_go(command: Callable) -> Callable:
    """Options on the checkpoints to keep, on precision, devices, and the queue."""
    for option in reversed(_WHERE_RUNS_GO):
        command = option(command)
    return command


_WHERE_RUNS_GO = (
    click.option(
        "--keep-checkpoints",
        type=click.Choice(["none", "best", "all"]),
        default="best",
        help="Fine-tuned models to keep: of no run, of the best of each model and task, of each run.",
    ),
    precision_option,
    click.option("--gpus", help="As CUDA_VISIBLE_DEVICES, or 'none' for the CPU.  [default: all]"),
    click.option(
        "--workers", type=click.IntRange(1), help="Runs at a time.  [default: as many as GPUs, else cores / threads]"
    ),
    click.option(
        "--threads",
        type=click.IntRange(1),
        default=1,
        help="Of a run on a CPU. Equal seeds and equal threads give equal results, to the last digit.",
    ),
    click.option(
        "--executor",
        type=click.Choice(["processes", "slurm", "submitit-local"]),
        default="processes",
        help="Where runs go: to this machine, to Slurm as an array, to submitit's processes (to try that).",
    ),
    click.option(
        "--slurm",
        multiple=True,
        metavar="NAME=VALUE...",
        callback=divided,
        help="submitit's parameters, such as slurm_partition=gpu gpus_per_node=1 timeout_min=600.",
    ),
)
