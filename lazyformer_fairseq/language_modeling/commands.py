"""``lazyformer lm``: prepares texts of language modelling, and evaluates models on them."""

from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.arguments import ExistingPath
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import Group
from lazyformer_fairseq.storage.atomic import refuse_filled_folder

A_PATH = click.Path(path_type=Path)
PREPARED = ExistingPath("no such file; give a folder that `lazyformer lm prepare` wrote", holds="manifest.json")
CORPORA = ("wikitext", "enwik8", "text8")


@click.group(cls=Group)
def lm() -> None:
    """Language models: prepare their data, train them, evaluate them.

    \b
    lazyformer lm prepare wikitext wikitext-2 data/wikitext-2
    lazyformer lm train par_transformer_base data/wikitext-103
    lazyformer lm evaluate checkpoints/par_transformer_base/checkpoint_best.pt data/wikitext-103
    lazyformer compare data/wikitext-2 results/compare --task language-model

    More in docs/language_models.md.
    """


@lm.command()
@click.argument("corpus", type=click.Choice(CORPORA))
@click.argument("source", type=ExistingPath())
@click.argument("out", type=A_PATH)
@click.option(
    "--official",
    type=click.Choice(["wikitext-2", "wikitext-103", "enwik8", "text8"]),
    help="Refuse a text that is not exactly this one.  [default: take any, say which it is]",
)
def prepare(corpus: str, source: Path, out: Path, official: Optional[str]) -> None:
    """Turn a text, as it is distributed, into the folder OUT that fairseq-train and `lazyformer lm evaluate` read.

    \b
    wikitext  WikiText-2 or -103 by words; SOURCE has wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens
    enwik8    its bytes, 90, 5 and 5 million; SOURCE is the file, or its folder
    text8     its characters, 90, 5 and 5 million; SOURCE is the file, or its folder

    OUT is written whole or not at all; manifest.json in it has the counts.
    """
    refuse_filled_folder(out)
    from lazyformer_fairseq.language_modeling import prepare as steps

    click.echo(steps.overview(steps.prepare(corpus, source, out, official)))


@lm.command()
@click.argument("checkpoint", type=ExistingPath("no such checkpoint", is_file=True))
@click.argument("data", type=PREPARED)
@click.option("--split", default="test", help="Which text of DATA: train, valid or test.")
@click.option("--tgt-len", type=click.IntRange(1), help="Tokens predicted at once.  [default: the training's]")
@click.option("--mem-len", type=click.IntRange(0), help="Tokens remembered before them.  [default: the training's]")
@click.option("--clamp-len", type=click.IntRange(-1),
              help="Longer distances, in tokens, count as it; 0: no limit.  [default: the training's]")  # fmt: skip
@click.option("--same-length/--no-same-length", default=None,
              help="Every query sees itself and the --mem-len tokens before it; else all of memory and segment up to "
                   "itself.  [default: the training's]")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(1), default=1,
              help="Streams read at once; more are quicker, with the same result but for rounding.")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is one]")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", help="Of weights and sums.")
@click.option("--json", "json_file", type=A_PATH, help="Write the result to this file too.")
def evaluate(
    checkpoint: Path,
    data: Path,
    split: str,
    batch_size: int,
    device: Optional[str],
    precision: str,
    json_file: Optional[Path],
    **lengths: Optional[int],
) -> None:
    """Measure perplexity per word, or bits per character, of CHECKPOINT over every token of a split of DATA.

    Batch size 1 defines the number: with more streams each first reads what batch size 1 would remember there.

    \b
    The paper's lengths:      --tgt-len --mem-len --clamp-len
    base on WikiText-103            64       640         400
    large on WikiText-103          128      1600        1000
    24b on enwik8 and text8         80      2100         820

    The authors' configurations evaluate all of them with --same-length, and train without it.

    \b
    lazyformer lm evaluate checkpoints/par_transformer_base/checkpoint_best.pt data/wikitext-103 \\
      --tgt-len 64 --mem-len 640 --clamp-len 400 --same-length
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError(f"--json {json_file}: its folder is not there; make it first")
    from lazyformer_fairseq.data.datasets.token_streams import open_tokens
    from lazyformer_fairseq.language_modeling import evaluate as evaluation
    from lazyformer_fairseq.language_modeling.prepare import read_manifest
    from lazyformer_fairseq.storage.json_files import write_json

    manifest = read_manifest(data)
    if split not in manifest["splits"]:
        raise UserError(f"--split {split}: {data} has {', '.join(manifest['splits'])}")
    tokens = open_tokens(data / split)
    model, task = evaluation.load_model(checkpoint, data, device, precision)
    of_model = {name: getattr(model.cfg, name) for name in ("mem_len", "clamp_len", "same_length")}
    trained_with = {"tgt_len": task.cfg.tgt_len, **of_model}
    used = {name: trained_with[name] if value is None else value for name, value in lengths.items()}
    result = evaluation.evaluate(model, tokens, task.dictionary.eos(), **used, batch_size=batch_size)
    if json_file is not None:
        settings = {"checkpoint": str(checkpoint), "data": str(data), "split": split, "unit": manifest["unit"]}
        settings |= {**used, "batch_size": batch_size, "precision": precision}
        write_json(json_file, {**settings, **result.as_json()})
    click.echo(evaluation.in_words(result, manifest["unit"], split))
