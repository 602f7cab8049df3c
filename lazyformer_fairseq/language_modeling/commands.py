"""``lazyformer lm``: prepares texts of language modelling, and evaluates models on them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import CONFIGS, ExistingPath
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.options import DEVICE, Group, check, option, takes
from lazyformer_fairseq.storage.atomic import refuse_filled_folder

A_PATH = click.Path(path_type=Path)
PREPARED = ExistingPath("no such file; give a folder that `lazyformer lm prepare` wrote", holds="manifest.json")
CORPORA = ("wikitext", "enwik8", "text8")


@click.group(cls=Group)
def lm() -> None:
    """Language models: prepare their data, evaluate them.

    \b
    lazyformer lm prepare wikitext wikitext-2 data/wikitext-2
    lazyformer pretrain par_transformer_base data/wikitext-103
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


TRAINING_S = "the training's"


@dataclass(frozen=True)
class Reading:
    """Options of ``lazyformer lm evaluate``: how the text is read."""

    split: str = option("test", "Which text of DATA.", choices=("train", "valid", "test"))
    lengths: Optional[str] = option(
        None, "The paper's, base, large or 24b, or a YAML file of the next four; those given win.", metavar="NAME"
    )
    tgt_len: Optional[int] = option(None, "Tokens predicted at once.", low=1, shown=TRAINING_S)
    mem_len: Optional[int] = option(None, "Tokens remembered before them.", low=0, shown=TRAINING_S)
    clamp_len: Optional[int] = option(None, "Longer distances count as it; 0: no limit.", low=-1, shown=TRAINING_S)
    same_length: Optional[bool] = option(
        None,
        "Every query sees itself and the --mem-len tokens before it; else all of memory and segment up to itself.",
        shown=TRAINING_S,
    )
    batch_size: int = option(1, "Streams read at once; more are quicker, with the same result but for rounding.", low=1)
    device: Optional[str] = DEVICE()
    json: Optional[Path] = option(None, "Write the result to this file too.")


def read_lengths(name: str) -> dict[str, Any]:
    """How a text is read: of a YAML file, or of the paper's of that name in ``configs/language_modeling/evaluation``.

    Raises:
        UserError: there is none, or it holds anything else.
    """
    import yaml

    folder = CONFIGS / "language_modeling" / "evaluation"
    path = next(filter(Path.is_file, (Path(name), folder / f"{name}.yaml")), None)
    if path is None:
        known = [each.stem for each in sorted(folder.glob("*.yaml"))]
        raise UserError(f"--lengths {name}: no such file, nor one of {', '.join(known)}{nearest(name, known)}")
    kinds = {"tgt_len": int, "mem_len": int, "clamp_len": int, "same_length": bool}
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(given, dict) or any(type(value) is not kinds.get(key) for key, value in given.items()):
        raise UserError(f"{path}: must have numbers as tgt_len, mem_len and clamp_len, true or false as same_length")
    check(replace(Reading(), **given))
    return given


@lm.command()
@click.argument("checkpoint", type=ExistingPath("no such checkpoint", is_file=True))
@click.argument("data", type=PREPARED)
@takes(Reading)
def evaluate(checkpoint: Path, data: Path, settings: Reading) -> None:
    """Measure perplexity per word, or bits per character, of CHECKPOINT over every token of a split of DATA.

    Batch size 1 defines the number: with more streams each first reads what batch size 1 would remember there.

    \b
    --lengths, the paper's:   --tgt-len --mem-len --clamp-len
    base on WikiText-103            64       640         400
    large on WikiText-103          128      1600        1000
    24b on enwik8 and text8         80      2100         820

    All with --same-length, as the authors' configurations evaluate; they train without it.

    \b
    lazyformer lm evaluate checkpoints/par_transformer_base/checkpoint_best.pt data/wikitext-103 --lengths base
    """
    of_file = {} if settings.lengths is None else read_lengths(settings.lengths)
    if settings.json is not None and not settings.json.absolute().parent.is_dir():
        raise UserError(f"--json {settings.json}: its folder is not there; make it first")
    from lazyformer_fairseq.data.datasets.token_streams import open_tokens
    from lazyformer_fairseq.language_modeling import evaluate as evaluation
    from lazyformer_fairseq.language_modeling.prepare import read_manifest
    from lazyformer_fairseq.storage.json_files import write_json

    unit, tokens = read_manifest(data)["unit"], open_tokens(data / settings.split)
    model, dictionary, tgt_len = evaluation.load_model(checkpoint, data, settings.device)
    used = {"tgt_len": tgt_len}
    used |= {name: getattr(model.cfg, name) for name in ("mem_len", "clamp_len", "same_length")}
    used |= of_file | {name: value for name in used if (value := getattr(settings, name)) is not None}
    result = evaluation.evaluate(model, tokens, dictionary.eos(), **used, batch_size=settings.batch_size)
    if settings.json is not None:
        about = {"checkpoint": str(checkpoint), "data": str(data), "split": settings.split, "unit": unit}
        write_json(settings.json, {**about, **used, "batch_size": settings.batch_size, **result.as_json()})
    click.echo(evaluation.in_words(result, unit, settings.split))
