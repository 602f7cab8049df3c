"""The command ``lazyformer evaluate``."""

from pathlib import Path

import click

from lazyformer_fairseq.arguments import ExistingPath
from lazyformer_fairseq.child_process import stoppable
from lazyformer_fairseq.options import Command, takes
from lazyformer_fairseq.zero_shot.settings import EvaluationSettings


@click.command(cls=Command)
@click.argument("models", nargs=-1, metavar="[NAME=]MODEL...")
@click.option("--data", required=True, type=ExistingPath(), help="Folder of .jsonl files with minimal pairs.")
@takes(EvaluationSettings)
def evaluate(models: tuple[str, ...], data: Path, settings: EvaluationSettings) -> None:
    r"""Test which of two sentences language models prefer, without training: on BLiMP, or on your minimal pairs.

    A MODEL is a checkpoint, a folder of checkpoints, an export, or a masked or causal LM that transformers loads. Each
    line of a file in the folder --data is an object with sentence_good and sentence_bad. A masked LM scores a sentence
    by its pseudo-log-likelihood (each token masked in turn; Salazar et al., 2020), a causal LM by its log-likelihood.

    The answers of each model are kept in OUTPUT, so that a rerun only scores new models.

    \b
    lazyformer evaluate checkpoints/bert checkpoints/lazy --data blimp/data
    lazyformer evaluate bert=bert-base-uncased --data my_pairs --benchmark pairs --ngram my_corpus
    """
    if not models and settings.ngram is None:
        raise click.UsageError("give a MODEL or --ngram")
    with stoppable():
        from lazyformer_fairseq.zero_shot.run import run

        click.echo(run(models, data, settings))
