"""The command ``lazyformer import``."""

from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.options import Command, takes
from lazyformer_fairseq.storage.atomic import refuse_filled_folder
from lazyformer_fairseq.training.warm_start.options import WarmOptions


@click.command("import", cls=Command)
@click.argument("bert", metavar="BERT", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--head-name",
    help="Name of the head of a fine-tuned model. GLUE's tasks look for theirs: cola, sst-2 and so on.  [default: "
    "classifier; squad for one that finds answers]",
)
@click.option(
    "--tokenizer",
    "tokenizer_folder",
    type=click.Path(path_type=Path),
    help="Of a LazyFormerForMaskedLM, such as transformers' Trainer saves: the tokenizer beside its data, such as "
    "data/tokenizer.  [default: BERT/tokenizer, which an export has]",
)
@takes(WarmOptions, into="warm")
def import_model(
    bert: Path,
    out: Path,
    head_name: Optional[str],
    tokenizer_folder: Optional[Path],
    warm: WarmOptions,
) -> None:
    """Turn a BERT of the Hub into a checkpoint of this package, of the same or another pattern.

    It may be a RoBERTa, DistilBERT or ModernBERT too, or a LazyFormerForMaskedLM.

    BERT is its folder, with config.json, model.safetensors and its tokenizer's files; or a checkpoint of this package,
    or a folder of such. Nothing in it is run. Without
    --sublayer-pattern the model computes what it computed; with it, its weights start one of another pattern.

    OUT gets model.safetensors, config.json and the tokenizer; of a model that changed, warm_start.json and
    warm_start.md too, which say what became what. lazyformer_fairseq.load reads it, and fairseq-train
    --finetune-from-model OUT/model.safetensors starts from it.
    """
    refuse_filled_folder(out)
    warm.refuse_misfits()
    from lazyformer_fairseq.huggingface.importing import import_to

    changes = None
    if warm.changes:
        changes = warm
    notes = import_to(
        bert,
        out,
        head_name=head_name,
        warm=changes,
        tokenizer_folder=tokenizer_folder,
    )
    for note in notes:
        click.echo(note)
    click.echo(f"written: {out}")
