"""The command ``lazyformer demo``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.child_process import stoppable
from lazyformer_fairseq.corpus.commands import refuse_missing_inputs
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.options import Command, option, takes
from lazyformer_fairseq.training.laptop import LAPTOP_HELP


@dataclass(frozen=True)
class DemoSettings:
    """Settings that decide the demo's result; its folder keeps them, and resumes a demo of the same settings only.

    Attributes:
        vocab_size: number of symbols.
        valid_share: share of the documents that is held out, from which the acceptability task is made.
        tokens_per_sample: longest block.
        sequences: per update.
        finetuning_updates: on the acceptability task.
        seed: of everything.
    """

    corpus: Optional[str] = option(
        None, "Text file or folder of .txt files.", shown="the English prose that Python carries"
    )
    updates: int = option(5000, "Updates of pre-training.", low=6)
    recipe: str = option("laptop", f"How the models learn. {LAPTOP_HELP}.", choices=("laptop", "adam"))
    vocab_size: int = 4000
    valid_share: float = 0.2
    tokens_per_sample: int = 32
    sequences: int = 8
    finetuning_updates: int = 400
    seed: int = 1


@click.command(cls=Command)
@takes(DemoSettings)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("results/demo"),
    help="Folder of the results.",
    show_default=True,
)
def demo(settings: DemoSettings, output: Path) -> None:
    """Pre-train a tiny BERT and a tiny LazyFormer side by side, fine-tune both, print a table, draw a picture.

    Stop it at any time; rerun to resume.
    """
    refuse_without_extra("corpus", "lazyformer demo")
    if settings.corpus is not None:
        refuse_missing_inputs((settings.corpus,))
    from lazyformer_fairseq.experiments.demo.run import run_demo

    with stoppable():
        run_demo(settings, output)
