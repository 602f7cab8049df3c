"""The command ``lazyformer import``."""

from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.options import Command, with_options_from
from lazyformer_fairseq.storage.atomic import refuse_filled_folder
from lazyformer_fairseq.training.warm_start.options import WarmOptions


@click.command("import", cls=Command)
@click.argument("bert", metavar="BERT", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--head-name",
    help="Name for a fine-tuned model's head. Each GLUE task expects its own name, such as cola or sst-2.  "
    "[default: squad for a span head, otherwise classifier]",
)
@click.option(
    "--tokenizer",
    "tokenizer_folder",
    type=click.Path(path_type=Path),
    help="Tokenizer folder for a LazyFormerForMaskedLM, such as a model saved by transformers' Trainer. Pass the "
    "folder beside the model's training data, such as data/tokenizer.  [default: BERT/tokenizer, which an export "
    "contains]",
)
@with_options_from(WarmOptions, into="warm")
def import_model(
    bert: Path,
    out: Path,
    head_name: Optional[str],
    tokenizer_folder: Optional[Path],
    warm: WarmOptions,
) -> None:
    """Convert a BERT from the Hub to a lazyformer_fairseq checkpoint, with the same or a different pattern.

    The model may also be a RoBERTa, a DistilBERT, a ModernBERT or a LazyFormerForMaskedLM.

    BERT is the model's folder, which contains config.json, model.safetensors and the tokenizer files. It may also be a
    lazyformer_fairseq checkpoint, or a folder of checkpoints. No code in the folder is run. Without --sublayer-pattern,
    the model's outputs stay the same. With --sublayer-pattern, the weights initialize a model with that pattern.

    The command writes model.safetensors, config.json and the tokenizer to OUT. If the model changed, it also writes
    warm_start.json and warm_start.md, which map the old sublayers to the new ones. lazyformer_fairseq.load reads the
    folder, and fairseq-train --finetune-from-model OUT/model.safetensors starts from the model.
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
