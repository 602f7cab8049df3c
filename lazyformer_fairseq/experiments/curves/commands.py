"""The command ``lazyformer curves``."""

from pathlib import Path

import click

from lazyformer_fairseq.arguments import subset_of
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import Command

AXES = ("updates", "tokens", "hours", "flops")


@click.command(cls=Command)
@click.argument("runs", metavar="[NAME=]RUN...", nargs=-1, required=True)
@click.option(
    "--against",
    multiple=True,
    default=["updates"],
    callback=subset_of(AXES),
    metavar="A,B,...",
    help=f"Quantities to plot the loss against, one panel each: {', '.join(AXES)}.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("curves.png"),
    help="PNG file to write.",
)
@click.option("--training", is_flag=True, help="Also plot the training loss.")
def curves(runs: tuple[str, ...], against: tuple[str, ...], output: Path, training: bool) -> None:
    """Plot the validation losses of several runs in one figure, and print a table of their final losses and costs.

    A RUN is a folder of checkpoints that also contains the run's record: run.json and metrics.jsonl. A folder with
    subfolders phase1, phase2, ... is plotted as one run, and a dashed line marks the end of each phase but the last.
    Hours count only the work that led to the final weights, including validation and saving. FLOPs are computed from
    the model; an update counts as three forward passes.

    \b
    lazyformer curves checkpoints/bert_base checkpoints/lazyformer_m2x6_s --against updates,hours
    lazyformer curves bert=results/bert/run lazy=results/lazy/run --output results/loss.png
    """
    if output.suffix != ".png":
        raise UserError(f"--output {output}: the file name must end in .png")
    from lazyformer_fairseq.experiments.curves import report

    shown, silent = report.read_histories(report.find_runs(runs))
    report.draw(shown, against, output, training)
    click.echo(report.table(shown))
    for sentence in (*silent, *report.left_out(shown, against)):
        click.echo(sentence, err=True)
    click.echo(f"written: {output}")
