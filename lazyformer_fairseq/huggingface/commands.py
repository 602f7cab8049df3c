"""The command ``lazyformer import``."""

from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.arguments import ExistingPath
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.files.whole import refuse_filled_folder
from lazyformer_fairseq.warm_start.options import WarmOptions, warm_start_options


@click.command("import")
@click.argument("source", type=ExistingPath())
@click.argument("out", type=click.Path(path_type=Path))
@warm_start_options
def import_model(source: Path, out: Path, warm: Optional[WarmOptions]) -> None:
    """Start a model of another pattern from the weights of SOURCE, a checkpoint or a folder of checkpoints.

    OUT is as `lazyformer export` writes it, with warm_start.json and warm_start.md, which say what became what.
    LazyFormerModel.from_pretrained reads it, and fairseq-train --finetune-from-model OUT/model.safetensors goes on from
    it.
    """
    refuse_filled_folder(out)
    if warm is None:
        raise UserError("nothing would change: give --sublayer-pattern, --encoder-ffn-embed-dim or --max-positions")
    from lazyformer_fairseq.warm_start.convert import convert

    convert(source, out, warm)
    click.echo(f"written: {out}")
