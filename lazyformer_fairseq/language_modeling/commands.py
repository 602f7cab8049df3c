"""``lazyformer lm``: prepares texts and images, evaluates models on them, continues them, and probes what they know."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import CONFIGS, ExistingPath
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.language_modeling.settings import Preparing
from lazyformer_fairseq.options import DEVICE, Group, check, option, takes
from lazyformer_fairseq.storage import checked
from lazyformer_fairseq.storage.atomic import refuse_filled_folder

A_PATH = click.Path(path_type=Path)
PREPARED = ExistingPath(
    "no such file; give a folder that `lazyformer lm prepare` wrote",
    holds="manifest.json",
)
CORPORA = ("wikitext", "enwik8", "text8")


@click.group(cls=Group)
def lm() -> None:
    r"""Language models, of text and of images: prepare their data, evaluate them, let them write and draw.

    \b
    lazyformer lm prepare wikitext wikitext-2 data/wikitext-2
    lazyformer pretrain par_transformer_base data/wikitext-103
    lazyformer lm evaluate checkpoints/par_transformer_base/checkpoint_best.pt data/wikitext-103
    lazyformer compare data/wikitext-2 results/compare --task language-model
    lazyformer lm prepare-images photographs data/photographs
    lazyformer pretrain igpt_s data/photographs
    lazyformer lm sample checkpoints/igpt_s/checkpoint_best.pt data/photographs --output drawn.png

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
    r"""Turn a text, as it is distributed, into the folder OUT that fairseq-train and `lazyformer lm evaluate` read.

    \b
    wikitext  WikiText-2 or -103 by words; SOURCE has wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens
    enwik8    its bytes, 90, 5 and 5 million; SOURCE is the file, or its folder
    text8     its characters, 90, 5 and 5 million; SOURCE is the file, or its folder

    OUT is written whole or not at all; manifest.json in it has the counts.
    """
    refuse_filled_folder(out)
    from lazyformer_fairseq.language_modeling import prepare as steps

    click.echo(steps.overview(steps.prepare(corpus, source, out, official)))


@lm.command("prepare-images")
@click.argument("source", type=ExistingPath())
@click.argument("out", type=A_PATH)
@takes(Preparing)
def prepare_images(source: Path, out: Path, settings: Preparing) -> None:
    """Turn images into the folder OUT, for models such as igpt_s: each pixel a colour of a palette.

    SOURCE is a folder of pictures (PNG, JPEG, ...) or of .npy arrays (N, height, width) or (N, height, width, 3), uint8
    or from 0 to 1. A folder for each class, or labels.npy with a label for each image in the order of their files, are
    kept for `lazyformer lm probe`. Folders train, valid and test in SOURCE are the splits; else these are drawn.

    k-means finds the palette in training pixels; colours that are few enough already stay as they are.

    OUT is written whole or not at all: dict.txt has the colours, palette.npy too.
    """
    refuse_filled_folder(out)
    if not source.is_dir():
        raise UserError(f"{source}: is no folder; give the one that holds the images")
    if settings.palette is not None:
        PREPARED.convert(settings.palette, None, None)
    from lazyformer_fairseq.language_modeling import images

    click.echo(images.overview(images.prepare_images(source, out, settings)))


TRAINING_S = "the training's"


@dataclass(frozen=True)
class Reading:
    """Options of ``lazyformer lm evaluate``: how the text is read."""

    split: str = option("test", "Which text of DATA.", choices=("train", "valid", "test"))
    lengths: Optional[str] = option(
        None,
        "The paper's, base, large or 24b, or a YAML file of the next four; those given win.",
        metavar="NAME",
    )
    tgt_len: Optional[int] = option(None, "Tokens predicted at once.", low=1, shown=TRAINING_S)
    mem_len: Optional[int] = option(None, "Tokens remembered before them.", low=0, shown=TRAINING_S)
    clamp_len: Optional[int] = option(None, "Longer distances count as it; 0: no limit.", low=-1, shown=TRAINING_S)
    same_length: Optional[bool] = option(
        None,
        "Every query sees itself and the --mem-len tokens before it; else all of memory and segment up to itself.",
        shown=TRAINING_S,
    )
    batch_size: int = option(
        1,
        "Streams read at once; more are quicker, with the same result but for rounding.",
        low=1,
    )
    device: Optional[str] = DEVICE()
    json: Optional[Path] = option(None, "Write the result to this file too.")


@dataclass(frozen=True)
class Lengths:
    """Contents of a YAML file for ``--lengths``."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
    tgt_len: checked.PositiveCount = 1
    mem_len: checked.Count = 0
    clamp_len: int = 0
    same_length: bool = False


def read_lengths(name: str) -> dict[str, Any]:
    """Return how a text is read, by a YAML file, or by the paper's in ``configs/language_modeling/evaluation``.

    Raises:
        UserError: there is none, or it holds anything else.
    """
    folder = CONFIGS / "language_modeling" / "evaluation"
    path = next(filter(Path.is_file, (Path(name), folder / f"{name}.yaml")), None)
    if path is None:
        known = [each.stem for each in sorted(folder.glob("*.yaml"))]
        raise UserError(f"--lengths {name}: no such file, nor one of {', '.join(known)}{nearest(name, known)}")
    remedy = "write numbers as tgt_len, mem_len and clamp_len, true or false as same_length"
    given = checked.read_yaml(path, remedy)
    checked.as_type(Lengths, given, path, remedy)
    check(replace(Reading(), **given))
    return given


@lm.command()
@click.argument("checkpoint", type=ExistingPath("no such checkpoint", is_file=True))
@click.argument("data", type=PREPARED)
@takes(Reading)
def evaluate(checkpoint: Path, data: Path, settings: Reading) -> None:
    r"""Measure perplexity per word, or bits per character, of CHECKPOINT over every token of a split of DATA.

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
    of_file = {}
    if settings.lengths is not None:
        of_file = read_lengths(settings.lengths)
    if settings.json is not None and not settings.json.absolute().parent.is_dir():
        raise UserError(f"--json {settings.json}: its folder is not there; make it first")
    from lazyformer_fairseq.data.datasets.token_streams import item_length, open_tokens
    from lazyformer_fairseq.language_modeling import evaluate as evaluation
    from lazyformer_fairseq.language_modeling.prepare import read_manifest
    from lazyformer_fairseq.storage.json_files import write_json

    unit = read_manifest(data)["unit"]
    tokens = open_tokens(data / settings.split)
    model, dictionary, tgt_len = evaluation.load_model(checkpoint, data, settings.device)
    used = {"tgt_len": tgt_len}
    used |= {name: getattr(model.cfg, name) for name in ("mem_len", "clamp_len", "same_length")}
    used |= of_file | {name: value for name in used if (value := getattr(settings, name)) is not None}
    how = {"batch_size": settings.batch_size, "item": item_length(data)}
    result = evaluation.evaluate(model, tokens, dictionary.eos(), **used, **how)
    if settings.json is not None:
        about = {
            "checkpoint": str(checkpoint),
            "data": str(data),
            "split": settings.split,
            "unit": unit,
        }
        write_json(
            settings.json,
            {
                **about,
                **used,
                "batch_size": settings.batch_size,
                **result.as_json(),
            },
        )
    click.echo(evaluation.in_words(result, unit, settings.split))


@dataclass(frozen=True)
class Sampling:
    """Options of ``lazyformer lm sample``."""

    output: Optional[Path] = option(None, "Of images: the picture, a PNG.", shown="sample.png")
    count: int = option(8, "Images, or texts.", low=1)
    complete: bool = option(
        False,
        "Images: draw the lower halves of so many images of --split, four times each.",
    )
    split: str = option("test", "Whose images are completed.", choices=("train", "valid", "test"))
    prompt: str = option("", "Texts: what they begin with, symbols of dict.txt with spaces between.")
    length: int = option(100, "Texts: tokens, those of --prompt included.", low=1)
    temperature: float = option(1.0, "Lower is likelier; 0: always the likeliest.", low=0)
    top_k: int = option(0, "Draw among so many likeliest colours or words; 0: all.", low=0)
    seed: int = option(1, "Of what is drawn.", low=0)
    device: Optional[str] = DEVICE()


@lm.command()
@click.argument("checkpoint", type=ExistingPath("no such checkpoint", is_file=True))
@click.argument("data", type=PREPARED)
@takes(Sampling)
def sample(checkpoint: Path, data: Path, settings: Sampling) -> None:
    r"""Let the model of CHECKPOINT draw images, or write texts, as those of DATA that it learned from.

    \b
    lazyformer lm sample checkpoints/igpt_s/checkpoint_best.pt data/photographs --count 16
    lazyformer lm sample checkpoints/igpt_s/checkpoint_best.pt data/photographs --complete
    lazyformer lm sample checkpoints/par_transformer_base/checkpoint_best.pt data/wikitext-103 --prompt 'The war'

    In a picture of completions each row has what was given, four completions, and the image itself.
    """
    from lazyformer_fairseq.data.datasets.token_streams import item_length
    from lazyformer_fairseq.language_modeling import sample as sampling

    item = item_length(data)
    if settings.complete if not item else settings.prompt:
        raise UserError(f"{data}: holds {'images' if item else 'a text'}: --complete is for images, --prompt for texts")
    how = {name: getattr(settings, name) for name in ("temperature", "top_k", "seed", "device")}
    writer = sampling.Writer.load(checkpoint, data, **how)
    if not item:
        texts = writer.texts(settings.prompt, settings.count, settings.length)
        click.echo("\n\n".join(texts))
        return
    path = settings.output or Path("sample.png")
    writer.draw(path, settings.count, settings.split if settings.complete else None)
    click.echo(f"{path}: {settings.count} {'completed ' * settings.complete}images of {item} pixels")


@dataclass(frozen=True)
class Probing:
    """Options of ``lazyformer lm probe``."""

    images: int = option(20_000, "At most so many of each split.", low=2)
    batch_size: int = option(32, "Images that the model reads at once.", low=1)
    device: Optional[str] = DEVICE()


@lm.command()
@click.argument("checkpoint", type=ExistingPath("no such checkpoint", is_file=True))
@click.argument("data", type=PREPARED)
@click.argument("output", type=A_PATH)
@takes(Probing)
def probe(checkpoint: Path, data: Path, output: Path, settings: Probing) -> None:
    """Measure how well a linear probe tells the classes of DATA's images from each layer of CHECKPOINT's model.

    A logistic regression learns from the means over all pixels of what each layer reads, on the training split; the
    validation split chooses how strongly it is regularised. Raw pixels stand beside. OUTPUT gets probe.json and
    probe.png.
    """
    from lazyformer_fairseq.language_modeling import probe as probing

    results = probing.probe_layers(checkpoint, data, settings.images, settings.batch_size, settings.device)
    probing.write(results, output)
    click.echo(probing.table(results))
