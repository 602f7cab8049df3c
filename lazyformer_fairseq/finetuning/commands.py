"""The commands ``lazyformer finetune``, ``predict`` and ``report``: one way to fine-tune, whatever the task."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import named_path, refuse_missing
from lazyformer_fairseq.child_process import stoppable
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.settings import OF_BENCHMARKS, TASK_NAMES, GridSettings, PredictSettings
from lazyformer_fairseq.options import Command, refuse_given, takes
from lazyformer_fairseq.storage.atomic import refuse_filled_folder

NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
A_PATH = click.Path(path_type=Path)
TEXTS = (".tsv", ".csv", ".jsonl", ".txt", ".conll")  # endings of files of texts


def run_grid(task: Optional[str], settings: GridSettings) -> None:
    """Prepare what is missing of the data; where there are checkpoints, run what is missing of a grid, and report."""
    _refuse_values(settings.checkpoints)
    refuse_missing(settings.data, settings.tokenizer, *(named_path(text)[1] for text in settings.checkpoints))
    if not settings.checkpoints and not (settings.data and settings.tokenizer):
        raise click.UsageError("give a checkpoint to start from; or --data and --tokenizer, to prepare data alone")
    with stoppable("stopped: nothing has run yet; rerun to resume"):
        from lazyformer_fairseq.data.text.tokenizer import find_tokenizer_folder
        from lazyformer_fairseq.finetuning.launch import choose_benchmark, run_to_the_end

        benchmark = choose_benchmark(task, settings)
        if settings.checkpoints:
            run_to_the_end(benchmark, settings)
        wanted = replace(settings, tokenizer=find_tokenizer_folder(settings.tokenizer))
        click.echo(benchmark.prepare(wanted))


def _refuse_values(checkpoints: Sequence[str]) -> None:
    """Raise a UserError for a further value of an option that stands behind a space, where only checkpoints stand."""
    for text in checkpoints:
        path = named_path(text)[1]
        if not path.exists() and NUMBER.fullmatch(str(path)):
            raise UserError(
                f"{text}: is no checkpoint; if it is a value of an option, put a comma before it, as in --epochs "
                "10,MNLI=3 or --seeds 1,2"
            )


@click.command(cls=Command)
@click.argument("checkpoints", nargs=-1, metavar="CHECKPOINT...")
@click.option(
    "--task",
    metavar="NAME",
    help=f"To fine-tune on: {', '.join(TASK_NAMES)}.  [default: a custom task where --data holds train.tsv, .csv, "
    ".jsonl or .conll; else glue]",
)
@takes(GridSettings, into="")
def finetune(task: Optional[str], checkpoints: tuple[str, ...], **given: Any) -> None:
    r"""Fine-tune every CHECKPOINT, a file, a folder or NAME=FILE, on a task, and report.

    Custom labels or scores stand in a folder, in train.tsv and dev.tsv, whose first line names the columns, as
    text and label; tags of words, such as names, in train.conll and dev.conll, a word and its tag per line. They
    take two rates and three seeds of ten epochs each. Then `lazyformer predict` labels texts or tags words. GLUE is
    trained by LazyFormer's Table 5, four rates and five seeds of each task, SQuAD as in PAR's Table 4, BabyLM's tasks
    by one rate and seed as in its evaluation of 2025. What is missing of the data is prepared first; without a
    CHECKPOINT nothing else is done. One run per GPU, or several on the CPU's cores, each with a folder of its own and a
    result.json in it. At the end comes the table, printed and, with pictures, in OUTPUT/report. Stop it at any time;
    rerun to resume: finished runs are not repeated.

    \b
    lazyformer finetune model/checkpoint_best.pt --data my_reviews --output results/my_reviews
    lazyformer finetune model/checkpoint_best.pt --data my_names --output results/my_names
    lazyformer finetune model/checkpoint_best.pt --data glue_data --output results/glue
    lazyformer finetune model/checkpoint_best.pt --task babylm --data babylm_glue --output results/babylm
    lazyformer finetune bert=a.pt lazy=b.pt --task squad --data squad_data --output results/squad
    """
    run_grid(task, GridSettings(checkpoints=checkpoints, **given))


@click.command(cls=Command)
@click.argument("sources", nargs=-1, required=True, type=A_PATH, metavar="MODEL TEXTS | FOLDER...")
@click.option(
    "--output",
    type=A_PATH,
    help="File (for TEXTS) or folder to write; must not exist.  [default: for TEXTS TEXTS.predictions.tsv or so]",
)
@takes(PredictSettings)
def predict(sources: tuple[Path, ...], output: Optional[Path], settings: PredictSettings) -> None:
    r"""Label the texts in a file, or write the files that gluebenchmark.com takes, or SQuAD's predictions.

    MODEL is a fine-tuned checkpoint, the folder of one, a grid's with one model and task, or one that `lazyformer
    export` wrote. TEXTS ends in .tsv, .csv or .jsonl and names its columns in its first line, or in .txt and has a
    text a line. Its rows are written with prediction and probability after each; if it has a column of labels, the
    answers are marked by them. A model that tags words takes a .conll file too, with a word per line.
    A model for SQuAD takes a file of questions, .json, in place of TEXTS.

    \b
    lazyformer predict results/my_reviews texts.tsv

    FOLDER is a grid's, as `lazyformer finetune` wrote it: the best run of each model and task counts, and each model
    has a folder of its own. Or it is a run's; several of GLUE are of different tasks. A checkpoint answers SQuAD's
    questions too.
    """
    refuse_missing(*sources, settings.data, settings.tokenizer)
    if len(sources) == 2 and sources[1].suffix.lower() == ".json":
        refuse_given(settings, ("data",), f"means nothing beside {sources[1]}, a file of questions")
        sources, settings = sources[:1], replace(settings, data=sources[1])
    has_texts = len(sources) == 2 and sources[1].is_file() and sources[1].suffix.lower() in TEXTS
    if has_texts:
        refuse_given(settings, OF_BENCHMARKS, f"means nothing for {sources[1]}, a file of texts")
    else:
        refuse_given(settings, ("text", "head"), "is for a file of texts alone")
        if output is None:
            raise click.UsageError(f"give --output; or a MODEL, and a file of texts that ends in {', '.join(TEXTS)}")
        refuse_filled_folder(output)
    with stoppable("stopped; nothing was written"):
        from lazyformer_fairseq.data.text.tokenizer import find_tokenizer_folder
        from lazyformer_fairseq.finetuning import launch, predict_texts, registry

        if settings.tokenizer:
            settings = replace(settings, tokenizer=find_tokenizer_folder(settings.tokenizer))
        if has_texts:
            model = registry.best_run(sources[0])
            lines = predict_texts.predict_texts(model, sources[1], output, settings)
        else:
            lines = launch.predict(sources, output, settings)
        click.echo("\n".join(lines))


@click.command(cls=Command)
@click.argument("folder", type=A_PATH)
@click.option("--output", type=A_PATH, help="Folder of tables and pictures.  [default: FOLDER/report]")
def report(folder: Path, output: Optional[Path]) -> None:
    """Bring the runs in FOLDER, which `lazyformer finetune` wrote, to a table, in Markdown, and a picture.

    An unfinished grid is reported as such.
    """
    refuse_missing(folder)
    from lazyformer_fairseq.finetuning.report import write_report

    output = output or folder / "report"
    click.echo(write_report(folder, output))
    click.echo(f"written to {output}")
