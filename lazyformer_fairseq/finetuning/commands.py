"""The commands ``lazyformer finetune``, ``predict`` and ``evaluate``: one way to fine-tune, whatever the task."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import refuse_missing
from lazyformer_fairseq.finetuning.settings import MODULES, GridSettings, PredictSettings
from lazyformer_fairseq.options import Command, takes
from lazyformer_fairseq.storage.atomic import refuse_filled_folder

A_PATH = click.Path(path_type=Path)


def _file_of(checkpoint: str) -> Path:
    """The path in NAME=FILE, or all of it."""
    return Path(checkpoint if Path(checkpoint).exists() else checkpoint.partition("=")[2] or checkpoint)


def run_grid(task: str, settings: GridSettings) -> None:
    """Prepares what is missing; trains what is missing of a grid and reports, where there are checkpoints."""
    refuse_missing(settings.data, settings.tokenizer, *map(_file_of, settings.checkpoints))
    if not settings.checkpoints and not (settings.data and settings.tokenizer):
        raise click.UsageError("give a checkpoint to start from; or --data and --tokenizer, to prepare data alone")
    from lazyformer_fairseq.finetuning.benchmark import find_benchmark
    from lazyformer_fairseq.finetuning.launch import prepare_alone, run_to_the_end

    benchmark = find_benchmark(task)
    if settings.checkpoints:
        run_to_the_end(benchmark, settings)
    click.echo(prepare_alone(benchmark, settings))


@click.command(cls=Command, takes_words=True)
@click.argument("checkpoints", nargs=-1, metavar="CHECKPOINT...")
@click.option("--task", type=click.Choice(list(MODULES)), default="glue", show_default=True, help="To fine-tune on.")
@takes(GridSettings, into="")
@click.option("--checkpoint", "more", multiple=True, hidden=True)
def finetune(task: str, checkpoints: tuple[str, ...], more: tuple[str, ...], **given: Any) -> None:
    """Fine-tune every CHECKPOINT, a file, a folder or NAME=FILE, on a task, and report.

    GLUE is trained by LazyFormer's Table 5, four rates and five seeds of each task, SQuAD as in PAR's Table 4. What is
    missing of the data is prepared first; without a CHECKPOINT nothing else is done. One run a GPU, or several on the
    CPU's cores, each with a folder of its own and a result.json in it. At the end comes the table, printed and, with
    pictures, in OUTPUT/report. Stop it at any time; rerun to resume: finished runs are not repeated.

    \b
    lazyformer finetune model/checkpoint_best.pt --data glue_data --output results/glue
    lazyformer finetune bert=a.pt lazy=b.pt --task squad --data squad_data --output results/squad
    """
    run_grid(task, GridSettings(checkpoints=(*checkpoints, *more), **given))


@click.command(cls=Command, takes_words=True)
@click.argument("sources", nargs=-1, required=True, type=A_PATH, metavar="FOLDER...")
@click.option("--output", type=A_PATH, required=True, help="Folder to write; must not exist.")
@takes(PredictSettings)
def predict(sources: tuple[Path, ...], output: Path, settings: PredictSettings) -> None:
    """Let fine-tuned models answer: the files that gluebenchmark.com takes, or SQuAD's predictions.

    FOLDER is a grid's, as `lazyformer finetune` wrote it: the best run of each model and task counts, and each model
    has a folder of its own. Or it is a run's; several of GLUE are of different tasks. A checkpoint answers SQuAD's
    questions too.
    """
    refuse_filled_folder(output)
    refuse_missing(*sources, settings.data, settings.tokenizer)
    from lazyformer_fairseq.data.text.tokenizer import find_tokenizer_folder
    from lazyformer_fairseq.finetuning.launch import predict

    if settings.tokenizer:
        settings = replace(settings, tokenizer=find_tokenizer_folder(settings.tokenizer))
    for line in predict(sources, output, settings):
        click.echo(line)


@click.command(cls=Command)
@click.argument("folder", type=A_PATH)
@click.option("--output", type=A_PATH, help="Folder of tables and pictures.  [default: FOLDER/report]")
def evaluate(folder: Path, output: Optional[Path]) -> None:
    """Bring the runs in FOLDER, which `lazyformer finetune` wrote, to a table: Markdown, CSV, LaTeX and pictures.

    An unfinished grid is reported as such.
    """
    refuse_missing(folder)
    from lazyformer_fairseq.finetuning.report import write_report

    output = output or folder / "report"
    click.echo(write_report(folder, output))
    click.echo(f"written to {output}")
