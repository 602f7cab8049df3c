"""The commands ``lazyformer finetune``, ``lazyformer predict`` and ``lazyformer report``."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import named_path, refuse_missing
from lazyformer_fairseq.child_process import exit_on_interrupt
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.settings import BENCHMARK_OPTIONS, TASK_NAMES, GridSettings, PredictSettings
from lazyformer_fairseq.options import Command, reject_non_defaults, with_options_from
from lazyformer_fairseq.storage.atomic import refuse_filled_folder
from lazyformer_fairseq.training.trackers import refuse_missing_trackers

NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
A_PATH = click.Path(path_type=Path)
TEXTS = (".tsv", ".csv", ".jsonl", ".txt", ".conll")  # extensions of text files


def run_grid(task: Optional[str], settings: GridSettings) -> None:
    """Prepare missing data; if there are checkpoints to start from, also complete the grid and report on it."""
    _check_checkpoint_arguments(settings.checkpoints)
    refuse_missing_trackers(settings.report_to)
    checkpoints = [path for _, path in map(named_path, settings.checkpoints)]
    refuse_missing(settings.data, settings.tokenizer, *checkpoints)
    if not settings.checkpoints and not (settings.data and settings.tokenizer):
        raise click.UsageError("pass a checkpoint to start from, or --data and --tokenizer to only prepare data")
    with exit_on_interrupt("stopped: nothing has run yet; rerun to resume"):
        from lazyformer_fairseq.data.text.tokenizer import find_tokenizer_folder
        from lazyformer_fairseq.finetuning.held_out import with_dev_file
        from lazyformer_fairseq.finetuning.launch import choose_benchmark, run_to_the_end

        settings = with_dev_file(task, settings)
        benchmark = choose_benchmark(task, settings)
        if settings.checkpoints:
            run_to_the_end(benchmark, settings)
        wanted = replace(settings, tokenizer=find_tokenizer_folder(settings.tokenizer))
        click.echo(benchmark.prepare(wanted))


def _check_checkpoint_arguments(checkpoints: Sequence[str]) -> None:
    """Raise a UserError if a "checkpoint" is really an option's second value, separated from the first by a space."""
    for text in checkpoints:
        path = named_path(text)[1]
        if not path.exists() and NUMBER.fullmatch(str(path)):
            raise UserError(
                f"{text} is not a checkpoint; separate the values of an option by commas, as in --epochs 10,MNLI=3 "
                "or --seeds 1,2"
            )


@click.command(cls=Command)
@click.argument("checkpoints", nargs=-1, metavar="CHECKPOINT...")
@click.option(
    "--task",
    metavar="NAME",
    help=f"Task to fine-tune on: {', '.join(TASK_NAMES)}.  [default: a custom task if --data contains a file named "
    "train.tsv, train.csv, train.jsonl or train.conll; else glue]",
)
@with_options_from(GridSettings, into="")
def finetune(task: Optional[str], checkpoints: tuple[str, ...], **given: Any) -> None:
    r"""Fine-tune each CHECKPOINT (a file, a folder or NAME=FILE) on a task, and report the scores.

    A custom task is a folder of files. For text classification or regression, it contains train.tsv and dev.tsv, whose
    first lines name the columns, such as text and label. For tagging, such as named entity recognition, it contains
    train.conll and dev.conll, with one word and its tag per line. A model is fine-tuned on a custom task six times,
    with two learning rates and three seeds, for ten epochs each. `lazyformer predict` then uses the best run to label
    texts or tag words. GLUE runs follow Table 5 of the LazyFormer paper, with four learning rates and five seeds per
    task. SQuAD runs follow Table 4 of the PAR paper. BabyLM runs follow BabyLM's 2025 evaluation, with one learning
    rate and one seed.

    Missing data is prepared first. Without a CHECKPOINT, the command only prepares the data. Runs execute in parallel,
    either one per GPU or several on the cores of a CPU. Each run has its own folder with a result.json. At the end, the
    scores are printed as a table and written to OUTPUT/report, together with plots. You can stop the command at any
    time and rerun it to resume; finished runs are not repeated.

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
    help="File (for TEXTS) or folder to write; must not exist.  [default for TEXTS: TEXTS.predictions.tsv or similar]",
)
@with_options_from(PredictSettings)
def predict(sources: tuple[Path, ...], output: Optional[Path], settings: PredictSettings) -> None:
    r"""Label the texts in a file, write GLUE submission files for gluebenchmark.com, or answer SQuAD questions.

    MODEL is a fine-tuned checkpoint, its folder, the folder of a grid with one model and one task, or a folder written
    by `lazyformer export`. TEXTS is a .tsv, .csv or .jsonl file that names its columns, or a .txt file with one text
    per line. Each row is written with the prediction and its probability appended. If TEXTS has a label column, the
    predictions are scored against it. Tagging models also accept a .conll file with one word per line. For a SQuAD
    model, pass a .json file of questions instead of TEXTS.

    \b
    lazyformer predict results/my_reviews texts.tsv

    FOLDER is the folder of a grid, written by `lazyformer finetune`. The best run per model and task makes the
    predictions, and each model gets its own subfolder. You can also pass the folders of individual runs, one per GLUE
    task, or a checkpoint fine-tuned on SQuAD.
    """
    refuse_missing(*sources, settings.data, settings.tokenizer)
    texts = None
    if len(sources) == 2:
        path = sources[1]
        ending = path.suffix.lower()
        if ending == ".json":
            reject_non_defaults(settings, ("data",), f"cannot be combined with {path}, a file of questions")
            sources = sources[:1]
            settings = replace(settings, data=path)
        elif ending in TEXTS and path.is_file():
            texts = path
    if texts is not None:
        reject_non_defaults(settings, BENCHMARK_OPTIONS, f"does not apply to a text file such as {texts}")
    else:
        reject_non_defaults(settings, ("text", "head"), "applies only to text files")
        if output is None:
            raise click.UsageError(f"pass --output, or a MODEL and a text file that ends in {', '.join(TEXTS)}")
        refuse_filled_folder(output)
    with exit_on_interrupt("stopped; nothing was written"):
        from lazyformer_fairseq.data.text.tokenizer import find_tokenizer_folder
        from lazyformer_fairseq.finetuning import launch, predict_texts, registry

        if settings.tokenizer:
            settings = replace(settings, tokenizer=find_tokenizer_folder(settings.tokenizer))
        if texts is not None:
            model = registry.best_run(sources[0])
            lines = predict_texts.predict_texts(model, texts, output, settings)
        else:
            lines = launch.predict(sources, output, settings)
        click.echo("\n".join(lines))


@click.command(cls=Command)
@click.argument("folder", type=A_PATH)
@click.option("--output", type=A_PATH, help="Output folder for tables and plots.  [default: FOLDER/report]")
def report(folder: Path, output: Optional[Path]) -> None:
    """Summarize the fine-tuning runs in FOLDER as Markdown tables and a plot.

    FOLDER is the output folder of `lazyformer finetune`. If the grid is unfinished, the report lists the missing runs.
    """
    refuse_missing(folder)
    from lazyformer_fairseq.finetuning.report import write_report

    output = output or folder / "report"
    click.echo(write_report(folder, output))
    click.echo(f"written to {output}")
