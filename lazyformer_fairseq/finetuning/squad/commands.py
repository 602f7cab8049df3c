"""The commands ``lazyformer squad``: prepare, run, report, predict."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import (
    CommandWithSeveralValues,
    ExistingPath,
    GroupOfCommands,
    checkpoint_at,
    numbers,
)
from lazyformer_fairseq.finetuning.options import checkpoints_option, where_runs_go
from lazyformer_fairseq.finetuning.squad.protocol import EPOCHS, LEARNING_RATES, SEEDS
from lazyformer_fairseq.storage.atomic import refuse_filled_folder

A_PATH = click.Path(path_type=Path)
THERE = ExistingPath()


def data_options(command: Callable) -> Callable:
    """Options on what is made of official files."""
    for option in reversed(_DATA_OPTIONS):
        command = option(command)
    return command


_DATA_OPTIONS = (
    click.option(
        "--dev-articles",
        type=click.IntRange(2),
        metavar="N",
        help="Hold out every Nth article of the file to train on, as OUTPUT/split; DATA may be that file.  [default: "
        "validate on dev-v1.1.json]",
    ),
    click.option("--max-length", type=click.IntRange(1), help="Tokens of an input, all counted.  [default: 384]"),
    click.option(
        "--stride",
        type=click.IntRange(1),
        help="A context too long for one input gets several, each so many tokens further on.  [default: 128]",
    ),
    click.option("--max-question-length", type=click.IntRange(1), help="Longer ones are cut.  [default: 64]"),
    click.option("--skip-mistakes", is_flag=True, help="Leave out, and list, questions that are wrong in the files."),
)


@click.group(cls=GroupOfCommands)
def squad() -> None:
    """Fine-tune encoders on SQuAD v1.1, and let them answer questions. `run` does all of it but the predictions."""


@squad.command(cls=CommandWithSeveralValues)
@click.option("--data", type=THERE, required=True, help="Folder of the official train-v1.1.json and dev-v1.1.json.")
@click.option(
    "--tokenizer", type=THERE, required=True, help="Tokenizer of the pre-training: its folder, or a checkpoint's."
)
@click.option("--output", type=A_PATH, required=True, help="Windows go to OUTPUT/data.")
@data_options
def prepare(data: Path, tokenizer: Path, output: Path, **given: Any) -> None:
    """Turn the official files into what is trained on, with the tokenizer of pre-training.

    OUTPUT/data/manifest.json has the counts, what was left out, and the hashes of the files. What is there already, of
    the same files and settings, is kept.
    """
    from lazyformer_fairseq.data.text.load_tokenizer import find_tokenizer_folder
    from lazyformer_fairseq.finetuning.squad import prepare as steps

    wanted = steps.Preparation(data, find_tokenizer_folder(tokenizer), output, **given)
    click.echo(steps.overview(steps.prepare(wanted)))


@squad.command(cls=CommandWithSeveralValues)
@checkpoints_option
@click.option("--output", type=A_PATH, required=True, help="Data, runs and report go into this folder.")
@click.option("--prepared", type=THERE, help="Prepared data, in place of --data.  [default: OUTPUT/data]")
@click.option("--data", type=THERE, help="Official files; what is not prepared yet goes to OUTPUT/data.")
@click.option("--tokenizer", type=THERE, help="For --data.  [default: beside the first checkpoint]")
@data_options
@click.option("--lrs", multiple=True, type=str, callback=numbers(float), default=LEARNING_RATES, help="Learning rates.")
@click.option(
    "--seeds",
    multiple=True,
    type=str,
    callback=numbers(int),
    default=SEEDS,
    help="Random seeds; each runs at each rate.",
)
@click.option("--epochs", type=click.IntRange(1), default=EPOCHS, help="Of each run.")
@where_runs_go
def run(**given: Any) -> None:
    """Fine-tune every model at every rate with every seed (PAR's Table 4: one rate, five seeds), and report.

    It first prepares the data that is missing. Each GPU takes one run at a time; without a GPU the CPU's cores share
    them. A run has a folder of its own, with its result.json. At the end the command prints the table, and writes it
    with pictures to OUTPUT/report. Stop it at any time; rerun to resume: finished runs are not repeated.
    """
    from lazyformer_fairseq.finetuning.run.door import run_to_the_end
    from lazyformer_fairseq.finetuning.squad.report.grid_report import write_report
    from lazyformer_fairseq.finetuning.squad.run.door import grid_and_executor

    run_to_the_end(lambda: grid_and_executor(given), given["keep_checkpoints"], write_report)


@squad.command()
@click.argument("out", type=THERE)
@click.option("--output", type=A_PATH, help="Folder of tables and pictures.  [default: OUT/report]")
def report(out: Path, output: Optional[Path]) -> None:
    """Bring the runs in OUT to a table: F1 and exact match, beside baselines and the paper; Markdown, CSV, LaTeX.

    OUT is the folder that `lazyformer squad run` wrote; an unfinished grid is reported as such.
    """
    from lazyformer_fairseq.finetuning.squad.report.grid_report import write_report

    output = output or out / "report"
    click.echo(write_report(out, output))
    click.echo(f"written to {output}")


@squad.command(cls=CommandWithSeveralValues)
@click.option("--output", type=THERE, help="A grid's folder: the best run of each model.")
@click.option("--checkpoint", type=A_PATH, help="A fine-tuned model, in place of --output: its file, or its folder.")
@click.option("--file", type=THERE, help="Questions, in the official layout.  [default: the grid's development file]")
@click.option("--to", "target", type=A_PATH, required=True, help="Folder to write; must not exist.")
@click.option("--tokenizer", type=THERE, help="Its folder, or a checkpoint's.  [default: beside the checkpoint]")
@click.option("--n-best", type=click.IntRange(1), default=20, help="Answers to a question in nbest_predictions.json.")
@click.option("--max-answer-tokens", type=click.IntRange(1), default=30, help="Longest answer.")
@click.option("--max-length", type=click.IntRange(1), help="Tokens of an input.  [default: as trained]")
@click.option("--stride", type=click.IntRange(1), help="Of inputs on one context.  [default: as trained]")
@click.option("--max-question-length", type=click.IntRange(1), help="Longer ones are cut.  [default: as trained]")
@click.option("--max-tokens", type=click.IntRange(1), default=8192, help="Tokens of a batch, padding included.")
@click.option("--skip-mistakes", is_flag=True, help="Leave out questions that are wrong in the file.")
def predict(output: Optional[Path], checkpoint: Optional[Path], target: Path, **given: Any) -> None:
    """Answer the questions of a file: write predictions.json for the official evaluation, and nbest_predictions.json.

    Give either --output or --checkpoint; with --output each model gets a folder of its own. Where the file has
    answers, the command prints exact match and F1.
    """
    if (output is None) == (checkpoint is None):
        raise click.UsageError("give either --output or --checkpoint")
    refuse_filled_folder(target)
    from lazyformer_fairseq.finetuning.squad.predict import Prediction, predict_best, predict_checkpoint

    options = {"tokens_per_sample": "max_length", "doc_stride": "stride", "max_question_tokens": "max_question_length"}
    sizes = {name: value for name, option in options.items() if (value := given.pop(option)) is not None}
    wanted = Prediction(sizes=sizes, **given)
    if checkpoint:
        predicted = [predict_checkpoint(checkpoint_at(checkpoint), target, wanted)]
    else:
        predicted = predict_best(output, target, wanted)
    for one in predicted:
        marks = [f"{name.replace('_', ' ')} {100 * value:.2f}" for name, value in (one.marks or {}).items()]
        click.echo(", ".join([f"{one.folder}: {one.questions:,} answers", *marks]))
