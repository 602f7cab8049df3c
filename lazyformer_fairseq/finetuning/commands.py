"""The commands ``lazyformer finetune``, ``predict``, ``evaluate``; ``glue`` and ``squad``, whose names are a task's."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.settings import (
    GLUE_ONLY,
    MODULES,
    SQUAD_ONLY,
    GridSettings,
    PredictSettings,
    Preparation,
)
from lazyformer_fairseq.options import Command, Group, takes
from lazyformer_fairseq.storage.atomic import refuse_filled_folder

A_PATH = click.Path(path_type=Path)


def refuse_missing(*paths: Optional[Path]) -> None:
    """Raises a UserError for a path that is given and not there."""
    for path in paths:
        if path is not None and not path.exists():
            raise UserError(f"{path}: no such file or folder")


def _file_of(checkpoint: str) -> Path:
    """The path in NAME=FILE, or all of it."""
    return Path(checkpoint if Path(checkpoint).exists() else checkpoint.partition("=")[2] or checkpoint)


# --- what the commands do ---------------------------------------------------------------------------------------------


def prepare_data(task: str, given: dict[str, Any]) -> None:
    """Turns official files into what is trained on; `given` has the fields of a Preparation."""
    refuse_missing(given["data"], given["tokenizer"])
    from lazyformer_fairseq.data.text.load_tokenizer import find_tokenizer_folder
    from lazyformer_fairseq.finetuning.benchmark import find_benchmark

    given["tokenizer"] = find_tokenizer_folder(given["tokenizer"])
    click.echo(find_benchmark(task).prepare(Preparation(**given)))


def run_grid(task: str, settings: GridSettings) -> None:
    """Trains what is missing of a grid and reports. Raises a UserError for a path that is not there."""
    refuse_missing(settings.data, settings.prepared, settings.tokenizer, *map(_file_of, settings.checkpoints))
    if not settings.checkpoints:
        raise click.UsageError("give a checkpoint to start from")
    from lazyformer_fairseq.finetuning.benchmark import find_benchmark
    from lazyformer_fairseq.finetuning.launch import run_to_the_end

    run_to_the_end(find_benchmark(task), settings)


def report_grid(folder: Path, output: Optional[Path], task: Optional[str] = None) -> None:
    """Writes and prints the report of a grid's folder; without a task, of the one that its grid.json names."""
    refuse_missing(folder)
    from lazyformer_fairseq.finetuning.benchmark import find_benchmark
    from lazyformer_fairseq.finetuning.report import write_report

    output = output or folder / "report"
    click.echo(write_report(folder, output, find_benchmark(task) if task else None))
    click.echo(f"written to {output}")


def predict_all(sources: Sequence[Path], target: Path, settings: PredictSettings, task: Optional[str] = None) -> None:
    """Predicts with the runs or checkpoints in `sources` and writes the answers to `target`, a new folder."""
    refuse_filled_folder(target)
    refuse_missing(*sources, settings.data, settings.tokenizer, settings.file)
    from lazyformer_fairseq.data.text.load_tokenizer import find_tokenizer_folder
    from lazyformer_fairseq.finetuning.predict import predict

    if settings.tokenizer:
        settings = replace(settings, tokenizer=find_tokenizer_folder(settings.tokenizer))
    for prediction in predict(sources, target, settings, task):
        for line in prediction.lines():
            click.echo(line)


# --- one way to fine-tune, whatever the task --------------------------------------------------------------------------


@click.command(cls=Command, takes_words=True)
@click.argument("words", nargs=-1, metavar="CHECKPOINT...")
@click.option(
    "--task", type=click.Choice(list(MODULES)), default="glue", show_default=True, help="What to fine-tune on."
)
@click.option("--output", type=A_PATH, help="Data, runs and report go into this folder.")
@takes(GridSettings, into="", without=("checkpoints", "output"))
@click.option("--checkpoint", "more", multiple=True, hidden=True)
def finetune(task: str, words: tuple[str, ...], more: tuple[str, ...], output: Optional[Path], **given: Any) -> None:
    """Fine-tune every CHECKPOINT, a file, a folder or NAME=FILE, on a task, and report.

    GLUE is trained by LazyFormer's Table 5, four rates and five seeds of each task, SQuAD as in PAR's Table 4. What is
    missing of the data is prepared first. One run a GPU, or several on the CPU's cores, each with a folder of its own
    and a result.json in it. At the end comes the table, printed and, with pictures, in OUTPUT/report. Stop it at any
    time; rerun to resume: finished runs are not repeated.

    \b
    lazyformer finetune model/checkpoint_best.pt --data glue_data --output results/glue
    lazyformer finetune bert=a.pt lazy=b.pt --task squad --data squad_data --output results/squad
    """
    if output is None and given["data"] is None and len(words) == 3:  # CHECKPOINT DATA OUT, as before
        click.echo("CHECKPOINT DATA OUT: is CHECKPOINT --data DATA --output OUT now", err=True)
        words, given["data"], output = words[:1], Path(words[1]), Path(words[2])
    if output is None:
        raise click.UsageError("Missing option '--output'.")
    run_grid(task, GridSettings(checkpoints=(*words, *more), output=output, **given))


@click.command(cls=Command)
@click.argument("sources", nargs=-1, required=True, type=A_PATH, metavar="FOLDER...")
@click.option("--output", type=A_PATH, required=True, help="Folder to write; must not exist.")
@takes(PredictSettings)
def predict(sources: tuple[Path, ...], output: Path, settings: PredictSettings) -> None:
    """Let fine-tuned models answer: the files that gluebenchmark.com takes, or SQuAD's predictions.

    FOLDER is a grid's, as `lazyformer finetune` wrote it: the best run of each model and task counts, and each model
    has a folder of its own. Or it is a run's; several of GLUE are of different tasks. A checkpoint answers SQuAD's
    questions too.
    """
    predict_all(sources, output, settings)


@click.command(cls=Command)
@click.argument("folder", type=A_PATH)
@click.option("--output", type=A_PATH, help="Folder of tables and pictures.  [default: FOLDER/report]")
def evaluate(folder: Path, output: Optional[Path]) -> None:
    """Bring the runs in FOLDER, which `lazyformer finetune` wrote, to a table: Markdown, CSV, LaTeX and pictures.

    An unfinished grid is reported as such.
    """
    report_grid(folder, output)


# --- the same with the task in the command's name ---------------------------------------------------------------------


def group_of(task: str, name: str, data: str) -> Group:
    """The commands `prepare`, `run`, `report` and `predict` of a task, in a group that is called as it is.

    Args:
        data: its official files, for the help.
    """
    others = SQUAD_ONLY if task == "glue" else GLUE_ONLY
    group = Group(task, help=f"Fine-tune encoders on {name}: `lazyformer finetune` and its kin with --task {task}.")

    @group.command("prepare", takes_words=True, help=f"Turn {data} into what is trained on, or reuse what is there.")
    @takes(Preparation, into="", without=(*others, *(("workers",) if task == "squad" else ())))
    def prepare(**given: Any) -> None:
        prepare_data(task, given)

    @group.command("run", takes_words=True, help=f"Fine-tune every model on {name} and report; rerun to resume.")
    @takes(GridSettings, without=others)
    def run(settings: GridSettings) -> None:
        run_grid(task, settings)

    @group.command("report", help="Bring the runs in OUT to a table: Markdown, CSV, LaTeX and pictures.")
    @click.argument("out", type=A_PATH)
    @click.option("--output", type=A_PATH, help="Folder of tables and pictures.  [default: OUT/report]")
    def report(out: Path, output: Optional[Path]) -> None:
        report_grid(out, output, task)

    @group.command("predict", takes_words=True, help=f"Let the best models of a grid, or given ones, answer {name}.")
    @click.option("--output", type=A_PATH, help="A grid's folder: the best run of each model.")
    @click.option("--run", "runs", type=A_PATH, multiple=True, help="Folders of runs, in place of --output.")
    @click.option("--checkpoint", type=A_PATH, help="A fine-tuned model, in place of --output.")
    @click.option("--to", "target", type=A_PATH, required=True, help="Folder to write; must not exist.")
    @takes(PredictSettings, without=others)
    def predict(
        output: Optional[Path],
        runs: tuple[Path, ...],
        checkpoint: Optional[Path],
        target: Path,
        settings: PredictSettings,
    ) -> None:
        sources = list(_given(output, runs, checkpoint))
        if len(sources) != max(1, len(runs)):
            raise click.UsageError(f"give either --{'run' if task == 'glue' else 'checkpoint'} or --output")
        predict_all(sources, target, settings, task)

    return group


def _given(output: Optional[Path], runs: Sequence[Path], checkpoint: Optional[Path]) -> Iterator[Path]:
    yield from runs
    yield from (path for path in (output, checkpoint) if path is not None)


glue = group_of("glue", "GLUE", "GLUE's official files")
squad = group_of("squad", "SQuAD v1.1", "SQuAD's official files")
