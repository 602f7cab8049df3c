"""The command ``lazyformer evaluate``."""

from pathlib import Path

import click

from lazyformer_fairseq.arguments import ExistingPath
from lazyformer_fairseq.child_process import exit_on_interrupt
from lazyformer_fairseq.options import Command, with_options_from
from lazyformer_fairseq.zero_shot.settings import EvaluationSettings


@click.command(cls=Command)
@click.argument("models", nargs=-1, metavar="[NAME=]MODEL...")
@click.option("--data", required=True, type=ExistingPath(), help="Folder of .jsonl files with minimal pairs.")
@with_options_from(EvaluationSettings)
def evaluate(models: tuple[str, ...], data: Path, settings: EvaluationSettings) -> None:
    r"""Test which of two sentences language models prefer, zero-shot, on BLiMP or your own minimal pairs.

    A MODEL is a checkpoint, a folder of checkpoints, an export, or a masked or causal LM that transformers can load.
    Each line of the files in --data is a JSON object with sentence_good and sentence_bad. Masked LMs score a sentence
    by its pseudo-log-likelihood (tokens are masked one at a time; Salazar et al., 2020), and causal LMs score it by its
    log-likelihood.

    Each model's answers are stored in OUTPUT, so a rerun scores only new models.

    \b
    lazyformer evaluate checkpoints/bert checkpoints/lazy --data blimp/data
    lazyformer evaluate bert=bert-base-uncased --data my_pairs --benchmark pairs --ngram my_corpus
    """
    if not models and settings.ngram is None:
        raise click.UsageError("pass a MODEL or --ngram")
    with exit_on_interrupt():
        from lazyformer_fairseq.zero_shot.run import run

        click.echo(run(models, data, settings))
