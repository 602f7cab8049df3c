"""The commands ``lazyformer glue``: prepare, run, report, predict."""

import os
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import CommandWithSeveralValues, ExistingPath, GroupOfCommands, divided, numbers
from lazyformer_fairseq.finetuning.glue.protocols import LAZYFORMER, PROTOCOLS
from lazyformer_fairseq.finetuning.options import checkpoints_option, where_runs_go
from lazyformer_fairseq.storage.atomic import refuse_filled_folder

A_PATH = click.Path(path_type=Path)
THERE = ExistingPath()


@click.group(cls=GroupOfCommands)
def glue() -> None:
    """Fine-tune encoders on GLUE, up to the paper's table. `run` does all of it but the submission files."""


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
    from lazyformer_fairseq.data.text.load_tokenizer import find_tokenizer_folder
    from lazyformer_fairseq.finetuning.glue import prepare as steps

    wanted = steps.Preparation(
        data, find_tokenizer_folder(tokenizer), output, max_length, workers or len(os.sched_getaffinity(0))
    )
    chosen = {task.name: task for task in map(find_task, tasks)}
    prepared = steps.prepare_tasks(wanted, list(chosen.values()) or steps.tasks_present(data))
    click.echo(steps.overview(prepared))


@glue.command(cls=CommandWithSeveralValues)
@checkpoints_option
@click.option("--output", type=A_PATH, required=True, help="Tasks, runs and report go into this folder.")
@click.option("--prepared", type=THERE, help="Prepared tasks, in place of --data.  [default: OUTPUT/tasks]")
@click.option("--data", type=THERE, help="Official download; what is not prepared yet goes to OUTPUT/tasks.")
@click.option("--tokenizer", type=THERE, help="For --data.  [default: beside the first checkpoint]")
@click.option("--protocol", type=click.Choice(list(PROTOCOLS)), default=LAZYFORMER, show_default=True,
              help="Whose tasks, rates, seeds, epochs, batches and warm-up are the defaults: LazyFormer's Table 5, or "
              "PAR's Table 4 (SST-2 and MRPC).")  # fmt: skip
@click.option("--tasks", multiple=True, callback=divided, help="Names of tasks.  [default: the eight of the paper]")
@click.option("--lrs", multiple=True, type=str, callback=numbers(float), help="Learning rates.  [default: the four "
              "of the paper]")  # fmt: skip
@click.option("--seeds", multiple=True, type=str, callback=numbers(int), help="Each at each rate.  [default: 1 to 5]")
@click.option("--epochs", type=click.IntRange(1), help="Epochs of every task.  [default: 10]")
@click.option("--batch-size", type=click.IntRange(1), help="Rows of an update.  [default: 32]")
@click.option("--warmup-ratio", type=click.FloatRange(0, 1, max_open=True),
              help="Share of the updates in which the rate rises.  [default: 0.06]")  # fmt: skip
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
    "--glue-head",
    type=click.Choice(["dense", "linear"]),
    default="dense",
    help="On <s>: RoBERTa's two linear maps with a tanh between, or one linear map.",
)
@click.option(
    "--pooler-dropout",
    type=click.FloatRange(0, 1, max_open=True),
    help="Dropout in the head.  [default: the checkpoint's, 0 unless set, in a dense head; 0.1 in a linear one]",
)
@where_runs_go
def run(**given: Any) -> None:
    """Fine-tune every model on every task at every rate with every seed (LazyFormer's Table 5), and report.

    What is missing of the data is prepared first. One run a GPU, or several on the CPU's cores, each with a folder of
    its own and a result.json in it. At the end comes the paper's table, printed and, with pictures, in OUTPUT/report.
    Stop it at any time; rerun to resume: finished runs are not repeated.
    """
    from lazyformer_fairseq.finetuning.glue.report.grid_report import write_report
    from lazyformer_fairseq.finetuning.glue.run.door import grid_and_executor
    from lazyformer_fairseq.finetuning.run.door import run_to_the_end

    run_to_the_end(lambda: grid_and_executor(given), given["keep_checkpoints"], write_report)


@glue.command()
@click.argument("out", type=THERE)
@click.option("--output", type=A_PATH, help="Folder of tables and pictures.  [default: OUT/report]")
@click.option("--squad", type=THERE, help="Folder of `lazyformer squad run`.  [default: squad beside OUT, if there]")
@click.option("--latency", type=THERE, help="Folder of `lazyformer bench table4`.  [default: table4 beside OUT]")
def report(out: Path, output: Optional[Path], squad: Optional[Path], latency: Optional[Path]) -> None:
    """Bring the runs in OUT to the paper's table: Markdown, CSV, LaTeX and pictures.

    OUT is the folder that `lazyformer glue run` wrote; an unfinished grid is reported as such. Where SQuAD's results or
    latencies lie beside, PAR Transformer's Table 4 follows: they are joined by the models' names.
    """
    from lazyformer_fairseq.finetuning.glue.report.grid_report import write_report

    output = output or out / "report"
    click.echo(write_report(out, output, squad, latency))
    click.echo(f"written to {output}")


@glue.command(cls=CommandWithSeveralValues)
@click.option("--run", "runs", type=THERE, multiple=True, help="Folders of runs, one a task.")
@click.option("--output", type=THERE, help="A grid's folder: the best run of each task and model.")
@click.option(
    "--data",
    type=THERE,
    help="Official files, or prepared ones.  [default: what the runs were trained on]",
)
@click.option("--to", "target", type=A_PATH, required=True, help="Folder to write; must not exist.")
@click.option("--tasks", multiple=True, callback=divided, help="Names of tasks, AX too.  [default: all]")
@click.option("--tokenizer", type=THERE, help="Its folder, or a checkpoint's.  [default: the run's]")
@click.option("--max-tokens", type=click.IntRange(min=1), default=8192, help="Tokens of a batch, padding included.")
@click.option("--zip", "zipped", is_flag=True, help="Write submission.zip too.")
def predict(runs: tuple[Path, ...], output: Optional[Path], target: Path, tasks: tuple[str, ...], **given: Any) -> None:
    """Write the files that gluebenchmark.com takes, for all test sets, AX and WNLI included.

    Give either --run or --output; with the latter each model has a folder of its own. AX is predicted by MNLI's model.
    """
    if bool(runs) == bool(output):
        raise click.UsageError("give either --run or --output")
    refuse_filled_folder(target)
    from lazyformer_fairseq.data.glue.task_table import find_task
    from lazyformer_fairseq.data.text.load_tokenizer import find_tokenizer_folder
    from lazyformer_fairseq.finetuning.glue.predict import Prediction, predict_best, predict_runs

    chosen = frozenset(find_task(name).name for name in tasks)
    given["tokenizer"] = given["tokenizer"] and find_tokenizer_folder(given["tokenizer"])
    wanted = Prediction(tasks=chosen, **given)
    for submission in predict_runs(runs, target, wanted) if runs else predict_best(output, target, wanted):
        for name, rows in submission.rows.items():
            click.echo(f"{submission.folder / name}: {rows:,} rows")
        for remark in submission.remarks:
            click.echo(remark)
        if submission.missing:
            click.echo(f"{submission.folder}: missing {', '.join(submission.missing)}")
