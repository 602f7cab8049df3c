"""The command ``lazyformer demo``."""

from pathlib import Path

import click

from lazyformer_fairseq.child_process import exit_on_interrupt
from lazyformer_fairseq.corpus.commands import refuse_missing_inputs
from lazyformer_fairseq.experiments.demo.settings import DemoSettings
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.options import Command, with_options_from


@click.command(cls=Command)
@with_options_from(DemoSettings)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("results/demo"),
    help="Folder for the results.",
    show_default=True,
)
def demo(settings: DemoSettings, output: Path) -> None:
    """Pre-train a tiny BERT and a tiny LazyFormer side by side, fine-tune both, print a table, and plot the losses.

    You can stop the command at any time and rerun it to resume.
    """
    refuse_without_extra("corpus", "lazyformer demo")
    if settings.corpus is not None:
        refuse_missing_inputs((settings.corpus,))
    from lazyformer_fairseq.experiments.demo.run import run_demo

    with exit_on_interrupt():
        run_demo(settings, output)
