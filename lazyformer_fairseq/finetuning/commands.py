"""The commands ``lazyformer finetune``, ``predict`` and ``report``, which work alike for all tasks."""

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
from lazyformer_fairseq.training.trackers import refuse_missing_trackers

NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
A_PATH = click.Path(path_type=Path)
TEXTS = (".tsv", ".csv", ".jsonl", ".txt", ".conll")  # endings of files with texts


def run_grid(task: Optional[str], settings: GridSettings) -> None:
    """Prepare missing data; if checkpoints are given, also run the missing runs of their grid and report."""
    _refuse_values(settings.checkpoints)
    refuse_missing_trackers(settings.report_to)
    refuse_missing(settings.data, settings.tokenizer, *(named_path(text)[1] for text in settings.checkpoints))
    if not settings.checkpoints and not (settings.data and settings.tokenizer):
        raise click.UsageError("give a checkpoint to start from, or --data and --tokenizer to only prepare data")
    with stoppable("stopped: nothing has run yet; rerun to resume"):
        from lazyformer_fairseq.data.text.tokenizer import find_tokenizer_folder
        from lazyformer_fairseq.finetuning.held_out import with_dev_file
        from lazyformer_fairseq.finetuning.launch import choose_benchmark, run_to_the_end

        settings = with_dev_file(task, settings)
        benchmark = choose_benchmark(task, settings)
        if settings.checkpoints:
            run_to_the_end(benchmark, settings)
        wanted = replace(settings, tokenizer=find_tokenizer_folder(settings.tokenizer))
        click.echo(benchmark.prepare(wanted))


def _refuse_values(checkpoints: Sequence[str]) -> None:
    """Raise a UserError for a value that follows an option after a space, where click expects a checkpoint."""
    for text in checkpoints:
        path = named_path(text)[1]
        if not path.exists() and NUMBER.fullmatch(str(path)):
            raise UserError(
                f"{text} is not a checkpoint; if it is a value of an option, put a comma before it, as in --epochs "
                "10,MNLI=3 or --seeds 1,2"
            )


@click.command(cls=Command)
@click.argument("checkpoints", nargs=-1, metavar="CHECKPOINT...")
@click.option(
    "--task",
    metavar="NAME",
    help=f"Task to fine-tune on: {', '.join(TASK_NAMES)}.  [default: a custom task if --data contains train.tsv, .csv, "
    ".jsonl or .conll; else glue]",
)
@takes(GridSettings, into="")
def finetune(task: Optional[str], checkpoints: tuple[str, ...], **given: Any) -> None:
    r"""Fine-tune every CHECKPOINT, a file, a folder or NAME=FILE, on a task, and report the scores.

    Custom tasks are read from a folder. Labels or scores of texts are in train.tsv and dev.tsv, whose first line names
    the columns, such as text and label. Tags of words, such as names, are in train.conll and dev.conll, with a word and
    its tag per line. A custom task runs two learning rates and three seeds of ten epochs each; afterwards `lazyformer
    predict` labels texts or tags words. GLUE is trained as in LazyFormer's Table 5, with four learning rates and five
    seeds per task, SQuAD as in PAR's Table 4, and BabyLM's tasks with one learning rate and seed, as in its evaluation
    of 2025.

    Missing data is prepared first; without a CHECKPOINT the command stops there. It trains one run per GPU, or several
    on the CPU's cores. Each run has its own folder with a result.json. At the end the table is printed and written to
    OUTPUT/report, together with plots. You can stop the command at any time and rerun it to resume; finished runs are
    not repeated.

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
    help="File (for TEXTS) or folder to write; must not exist.  [default for TEXTS: such as TEXTS.predictions.tsv]",
)
@takes(PredictSettings)
def predict(sources: tuple[Path, ...], output: Optional[Path], settings: PredictSettings) -> None:
    r"""Label the texts in a file, or write GLUE's files for gluebenchmark.com, or the predictions for SQuAD.

    MODEL is a fine-tuned checkpoint, its folder, the folder of a grid with one model and task, or a folder that
    `lazyformer export` wrote. TEXTS ends in .tsv, .csv or .jsonl and names its columns in the first line, or it ends in
    .txt and has one text per line. Its rows are written with the prediction and its probability appended. If it has a
    column of labels, the predictions are scored against them. A model that tags words also accepts a .conll file, with
    a word per line. A model for SQuAD takes a .json file of questions in place of TEXTS.

    \b
    lazyformer predict results/my_reviews texts.tsv

    FOLDER is the folder of a grid, as `lazyformer finetune` wrote it, of which the best run per model and task is used,
    and each model gets its own folder. FOLDER may also be that of a run; several must be runs of different GLUE tasks.
    A checkpoint can answer SQuAD's questions too.
    """
    refuse_missing(*sources, settings.data, settings.tokenizer)
    if len(sources) == 2 and sources[1].suffix.lower() == ".json":
        refuse_given(settings, ("data",), f"does not apply if {sources[1]}, a file of questions, is given")
        sources, settings = sources[:1], replace(settings, data=sources[1])
    has_texts = len(sources) == 2 and sources[1].is_file() and sources[1].suffix.lower() in TEXTS
    if has_texts:
        refuse_given(settings, OF_BENCHMARKS, f"does not apply to {sources[1]}, a file of texts")
    else:
        refuse_given(settings, ("text", "head"), "applies only to a file of texts")
        if output is None:
            raise click.UsageError(f"give --output, or a MODEL and a file of texts that ends in {', '.join(TEXTS)}")
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
@click.option("--output", type=A_PATH, help="Folder for tables and plots.  [default: FOLDER/report]")
def report(folder: Path, output: Optional[Path]) -> None:
    """Summarise the runs in FOLDER, which `lazyformer finetune` wrote, as tables in Markdown and a plot.

    The report of an unfinished grid says so.
    """
    refuse_missing(folder)
    from lazyformer_fairseq.finetuning.report import write_report

    output = output or folder / "report"
    click.echo(write_report(folder, output))
    click.echo(f"written to {output}")
