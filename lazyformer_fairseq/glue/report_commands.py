"""The commands ``lazyformer glue report`` and ``lazyformer glue predict``."""

from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.existing_paths import ExistingPath
from lazyformer_fairseq.files.whole import refuse_filled_folder
from lazyformer_fairseq.several_values import CommandWithSeveralValues, divided

A_PATH = click.Path(path_type=Path)
THERE = ExistingPath()


@click.command()
@click.argument("out", type=THERE)
@click.option("--output", type=A_PATH, help="Folder of tables and pictures.  [default: OUT/report]")
def report(out: Path, output: Optional[Path]) -> None:
    """Bring the runs in OUT to the paper's table: Markdown, CSV, LaTeX and pictures.

    OUT is the folder that `lazyformer glue run` wrote; an unfinished grid is reported as such.
    """
    from lazyformer_fairseq.glue.report.grid_report import write_report

    output = output or out / "report"
    click.echo(write_report(out, output))
    click.echo(f"written to {output}")


@click.command(cls=CommandWithSeveralValues)
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
def predict(
    runs: tuple[Path, ...],
    output: Optional[Path],
    data: Optional[Path],
    target: Path,
    tasks: tuple[str, ...],
    tokenizer: Optional[Path],
    max_tokens: int,
    zipped: bool,
) -> None:
    """Write the files that gluebenchmark.com takes, for all test sets, AX and WNLI included.

    Give either --run or --output; with the latter each model has a folder of its own. AX is predicted by MNLI's model.
    """
    if bool(runs) == bool(output):
        raise click.UsageError("give either --run or --output")
    refuse_filled_folder(target)
    from lazyformer_fairseq.data.glue.task_table import find_task
    from lazyformer_fairseq.glue.predict.predictions import Prediction, predict_best, predict_runs
    from lazyformer_fairseq.glue.prepare import find_tokenizer_folder

    chosen = frozenset(find_task(name).name for name in tasks)
    wanted = Prediction(data, tokenizer and find_tokenizer_folder(tokenizer), chosen, max_tokens, zipped)
    for submission in predict_runs(runs, target, wanted) if runs else predict_best(output, target, wanted):
        for name, rows in submission.rows.items():
            click.echo(f"{submission.folder / name}: {rows:,} rows")
        for remark in submission.remarks:
            click.echo(remark)
        if submission.missing:
            click.echo(f"{submission.folder}: missing {', '.join(submission.missing)}")
