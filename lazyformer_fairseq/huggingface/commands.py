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
    "--token-types",
    type=click.Choice(["auto", "keep", "fold"]),
    default="auto",
    show_default=False,
    help="By which BERT tells the two texts of a pair apart: keep them, or fold type 0 into the positions, which is "
    "exact for single texts alone.  [default: auto, keep where there are several]",
)
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
    token_types: str,
    head_name: Optional[str],
    tokenizer_folder: Optional[Path],
    warm: WarmOptions,
) -> None:
    """Turn a BERT of the Hub into a checkpoint of this package, of the same or another pattern.

    It may be a RoBERTa, DistilBERT or ModernBERT too, or a LazyFormerForMaskedLM.

    BERT is its folder, with config.json, safetensors (or pytorch_model.bin, of which only weights are read) and its
    tokenizer's files; or a checkpoint of this package, or a folder of such. Nothing in it is run. Without
    --sublayer-pattern the model computes what it computed; with it, its weights start one of another pattern.

    OUT gets model.safetensors, config.json and the tokenizer; of a model that changed, warm_start.json and
    warm_start.md too, which say what became what. lazyformer_fairseq.load reads it, and fairseq-train
    --finetune-from-model OUT/model.safetensors starts from it.
    """
    refuse_filled_folder(out)
    warm.refuse_misfits()
    from lazyformer_fairseq.huggingface.importing import import_to

    for note in import_to(bert, out, token_types, head_name, warm if warm.changes else None, tokenizer_folder):
        click.echo(note)
    click.echo(f"written: {out}")
