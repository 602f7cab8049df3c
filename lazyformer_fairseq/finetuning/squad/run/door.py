"""Checks everything for ``lazyformer squad run`` before anything trains, and reads its options."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

import click

from lazyformer_fairseq.data.squad.prepared_data import PreparedSquad
from lazyformer_fairseq.data.text.load_tokenizer import find_tokenizer_folder
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.run.cluster import Cluster
from lazyformer_fairseq.finetuning.run.executor import choose_executor, choose_precision
from lazyformer_fairseq.finetuning.run.start_models import StartModel, load_start_models
from lazyformer_fairseq.finetuning.run.workers import Workers
from lazyformer_fairseq.finetuning.squad.prepare import Preparation, overview, prepare
from lazyformer_fairseq.finetuning.squad.run.grid import Grid
from lazyformer_fairseq.finetuning.squad_family import SQUAD

PREPARING = ("dev_articles", "max_length", "stride", "max_question_length", "skip_mistakes")


def grid_and_executor(given: Mapping[str, Any]) -> tuple[Grid, Union[Workers, Cluster]]:
    """The grid that the options of the command line ask for, and where its runs go.

    Raises:
        UserError: data that is not prepared or not whole, a checkpoint that does not load or does not belong to the
            data, options that do not fit together.
    """
    executor = choose_executor(given, "lazyformer-squad")
    if given["data"]:
        models, prepared = _prepare(given)
    else:
        if unused := [name for name in PREPARING if given[name]]:
            raise UserError(f"--{unused[0].replace('_', '-')}: means something with --data alone")
        prepared = load_prepared(given["prepared"] or given["output"] / "data")
        models = load_start_models(given["checkpoints"], prepared.tokenizer_folder)
    refuse_short_models(models, prepared.manifest["max_length"])
    grid = Grid(
        given["output"],
        models,
        {SQUAD.name: prepared},
        given["lrs"],
        given["seeds"],
        {SQUAD.name: given["epochs"]},
        choose_precision(given),
    )
    for run in grid.runs:
        run.result()  # refuses one of other settings
    return grid, executor


def load_prepared(folder: Path) -> PreparedSquad:
    """Prepared data with all that training needs; UserError where some is missing or damaged."""
    if not PreparedSquad.is_at(folder):
        raise UserError(f"{folder}: not prepared; run `lazyformer squad prepare`, or give the official files by --data")
    prepared = PreparedSquad.load(folder)
    for split in SQUAD.splits:
        if prepared.read(split).windows.targets is None:
            raise UserError(f"{folder}: some questions of {split}.json have no answers; prepare a file that has them")
    return prepared


def refuse_short_models(models: list[StartModel], longest: int) -> None:
    """Raises a UserError for a model that has fewer positions than inputs have tokens."""
    for model in models:
        if model.max_positions < longest:
            raise UserError(
                f"{model.checkpoint}: has {model.max_positions} positions, but inputs have up to {longest} tokens; "
                f"prepare them with --max-length {model.max_positions} (and a --stride below that), in a folder of "
                "their own"
            )


def _prepare(given: Mapping[str, Any]) -> tuple[list[StartModel], PreparedSquad]:
    """Reads the models first, which takes less time; then prepares the data, or finds it prepared."""
    if given["prepared"]:
        raise UserError("--data and --prepared: give one of them")
    checkpoints = given["checkpoints"]
    tokenizer = find_tokenizer_folder(given["tokenizer"] or next(iter(checkpoints.values())).parent)
    models = load_start_models(checkpoints, tokenizer)
    wanted = Preparation(given["data"], tokenizer, given["output"], **{name: given[name] for name in PREPARING})
    refuse_short_models(models, wanted.settings.longest)
    click.echo(overview(prepare(wanted)))
    return models, load_prepared(given["output"] / "data")
