"""The command ``lazyformer import``."""

from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.files.whole import refuse_filled_folder


@click.command("import")
@click.argument("bert", metavar="BERT", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--token-types",
    type=click.Choice(["auto", "keep", "fold"]),
    default="auto",
    help="Of BERT, by which it tells the two texts of a pair apart: keep them, or fold type 0 into the positions, "
    "exact for single texts alone.  [default: auto, keep where there are several]",
    show_default=False,
)
@click.option(
    "--head-name",
    default="classifier",
    help="Name of the classification head of a fine-tuned model; GLUE's tasks look for theirs in lower case, as cola.",
)
@click.option("--checkpoint-file", help="Of a folder of this package's checkpoints: its name there.")
def import_model(bert: Path, out: Path, token_types: str, head_name: str, checkpoint_file: Optional[str]) -> None:
    """Turn a BERT, RoBERTa or DistilBERT from the Hub into a checkpoint of this package, exactly.

    BERT is its folder, with config.json, safetensors (or pytorch_model.bin, of which only weights are read) and its
    tokenizer's files; or a checkpoint of this package. Nothing in it is run.

    OUT gets model.safetensors, config.json and the tokenizer: LazyFormerModel.from_pretrained reads it, and
    fairseq-train --finetune-from-model OUT/model.safetensors starts from it.
    """
    refuse_filled_folder(out)
    from lazyformer_fairseq.huggingface.reading.importing import import_to

    for note in import_to(bert, out, token_types, head_name, checkpoint_file):
        click.echo(note)
    click.echo(f"written: {out}")
