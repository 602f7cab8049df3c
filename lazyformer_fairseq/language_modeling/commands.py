"""The commands ``lazyformer lm``, which prepare texts and images, evaluate models, sample from them and probe them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import CONFIGS, ExistingPath
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.language_modeling.settings import Preparing
from lazyformer_fairseq.options import DEVICE, Choice, Group, check, option, takes
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
    r"""Prepare data for language models of text and of images, evaluate the models, and let them write and draw.

    \b
    lazyformer lm prepare wikitext wikitext-2 data/wikitext-2
    lazyformer pretrain par_transformer_base data/wikitext-103
    lazyformer lm evaluate checkpoints/par_transformer_base/checkpoint_best.pt data/wikitext-103
    lazyformer compare data/wikitext-2 results/compare --task language-model
    lazyformer lm prepare-images photographs data/photographs
    lazyformer pretrain igpt_s data/photographs
    lazyformer lm sample checkpoints/igpt_s/checkpoint_best.pt data/photographs --output drawn.png

    See docs/language_models.md for more.
    """


@lm.command()
@click.argument("corpus", type=Choice(CORPORA))
@click.argument("source", type=ExistingPath())
@click.argument("out", type=A_PATH)
@click.option(
    "--official",
    type=Choice(["wikitext-2", "wikitext-103", "enwik8", "text8"]),
    help="Reject a text that is not exactly this one.  [default: accept any text and say which it is]",
)
def prepare(corpus: str, source: Path, out: Path, official: Optional[str]) -> None:
    r"""Turn a text, as it is distributed, into a folder OUT for fairseq-train and `lazyformer lm evaluate`.

    \b
    wikitext  WikiText-2 or -103 as words; SOURCE has wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens
    enwik8    its bytes, split into 90, 5 and 5 million; SOURCE is the file, or its folder
    text8     its characters, split into 90, 5 and 5 million; SOURCE is the file, or its folder

    OUT is written completely or not at all; its manifest.json has the counts.
    """
    refuse_filled_folder(out)
    from lazyformer_fairseq.language_modeling import prepare as steps

    click.echo(steps.overview(steps.prepare(corpus, source, out, official)))


@lm.command("prepare-images")
@click.argument("source", type=ExistingPath())
@click.argument("out", type=A_PATH)
@takes(Preparing)
def prepare_images(source: Path, out: Path, settings: Preparing) -> None:
    """Turn images into a folder OUT for models such as igpt_s, in which each pixel is a colour of a palette.

    SOURCE is a folder of pictures (PNG, JPEG, ...) or of .npy arrays (N, height, width) or (N, height, width, 3), as
    uint8 or as numbers from 0 to 1. Classes are kept for `lazyformer lm probe`: they are given by one folder per class,
    or by labels.npy with one label per image in the order of their files. Folders train, valid and test in SOURCE are
    the splits; without them, the splits are drawn at random.

    The palette is found by k-means on training pixels; if the images have few enough colours, these are the palette.

    OUT is written completely or not at all. Its dict.txt and palette.npy contain the colours.
    """
    refuse_filled_folder(out)
    if not source.is_dir():
        raise UserError(f"{source} is not a folder; give the folder of the images")
    if settings.palette is not None:
        PREPARED.convert(settings.palette, None, None)
    from lazyformer_fairseq.language_modeling import images

    click.echo(images.overview(images.prepare_images(source, out, settings)))


TRAINING_S = "the training's"


@dataclass(frozen=True)
class Reading:
    """Options of ``lazyformer lm evaluate`` that determine how the text is read."""

    split: str = option("test", "Split of DATA to evaluate.", choices=("train", "valid", "test"))
    lengths: Optional[str] = option(
        None,
        "Lengths of the paper, base, large or 24b, or a YAML file with the next four options, which override it.",
        metavar="NAME",
    )
    tgt_len: Optional[int] = option(None, "Number of tokens predicted at once.", low=1, shown=TRAINING_S)
    mem_len: Optional[int] = option(None, "Number of remembered tokens before them.", low=0, shown=TRAINING_S)
    clamp_len: Optional[int] = option(
        None, "Distances above this one count as this one; 0 for no limit.", low=-1, shown=TRAINING_S
    )
    same_length: Optional[bool] = option(
        None,
        "Let every query attend to itself and the --mem-len tokens before it, not to all of memory and segment before "
        "it.",
        shown=TRAINING_S,
    )
    batch_size: int = option(
        1,
        "Number of streams read at once; more are faster, with the same result up to rounding.",
        low=1,
    )
    device: Optional[str] = DEVICE()
    json: Optional[Path] = option(None, "Also write the result to this JSON file.")


@dataclass(frozen=True)
class Lengths:
    """The content of a YAML file for ``--lengths``."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
    tgt_len: checked.PositiveCount = 1
    mem_len: checked.Count = 0
    clamp_len: int = 0
    same_length: bool = False


def read_lengths(name: str) -> dict[str, Any]:
    """Return the lengths from a YAML file, or the paper's from ``configs/language_modeling/evaluation``.

    Raises:
        UserError: there is no such file, or it contains anything else.
    """
    folder = CONFIGS / "language_modeling" / "evaluation"
    path = next(filter(Path.is_file, (Path(name), folder / f"{name}.yaml")), None)
    if path is None:
        known = [each.stem for each in sorted(folder.glob("*.yaml"))]
        raise UserError(f"--lengths {name}: neither a file nor one of {', '.join(known)}{nearest(name, known)}")
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

    Batch size 1 defines the result. With more streams, each stream first reads the text that batch size 1 would
    remember.

    \b
    --lengths of the paper    --tgt-len --mem-len --clamp-len
    base on WikiText-103            64       640         400
    large on WikiText-103          128      1600        1000
    24b on enwik8 and text8         80      2100         820

    All of them use --same-length, as the authors' configurations evaluate; they train without it.

    \b
    lazyformer lm evaluate checkpoints/par_transformer_base/checkpoint_best.pt data/wikitext-103 --lengths base
    """
    of_file = {}
    if settings.lengths is not None:
        of_file = read_lengths(settings.lengths)
    if settings.json is not None and not settings.json.absolute().parent.is_dir():
        raise UserError(f"--json {settings.json}: its folder does not exist; create it first")
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

    output: Optional[Path] = option(None, "Images: the PNG file to write.", shown="sample.png")
    count: int = option(8, "Number of images or texts.", low=1)
    complete: bool = option(
        False,
        "Images: complete the lower halves of --count images of --split, four times each.",
    )
    split: str = option("test", "Split whose images are completed.", choices=("train", "valid", "test"))
    prompt: str = option("", "Texts: their beginning, as symbols of dict.txt separated by spaces.")
    length: int = option(100, "Texts: number of tokens, including those of --prompt.", low=1)
    temperature: float = option(1.0, "Sampling temperature; 0 always takes the likeliest token.", low=0)
    top_k: int = option(0, "Number of likeliest colours or words to sample from; 0 for all.", low=0)
    seed: int = option(1, "Random seed of the samples.", low=0)
    device: Optional[str] = DEVICE()


@lm.command()
@click.argument("checkpoint", type=ExistingPath("no such checkpoint", is_file=True))
@click.argument("data", type=PREPARED)
@takes(Sampling)
def sample(checkpoint: Path, data: Path, settings: Sampling) -> None:
    r"""Let the model of CHECKPOINT draw images, or write texts, like those of DATA that it learned from.

    \b
    lazyformer lm sample checkpoints/igpt_s/checkpoint_best.pt data/photographs --count 16
    lazyformer lm sample checkpoints/igpt_s/checkpoint_best.pt data/photographs --complete
    lazyformer lm sample checkpoints/par_transformer_base/checkpoint_best.pt data/wikitext-103 --prompt 'The war'

    In a picture of completions, each row has the given half, four completions, and the original image.
    """
    from lazyformer_fairseq.data.datasets.token_streams import item_length
    from lazyformer_fairseq.language_modeling import sample as sampling

    item = item_length(data)
    if settings.complete if not item else settings.prompt:
        raise UserError(
            f"{data} contains {'images' if item else 'a text'}; --complete is for images, --prompt for texts"
        )
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

    images: int = option(20_000, "Maximum number of images per split.", low=2)
    batch_size: int = option(32, "Number of images that the model reads at once.", low=1)
    device: Optional[str] = DEVICE()


@lm.command()
@click.argument("checkpoint", type=ExistingPath("no such checkpoint", is_file=True))
@click.argument("data", type=PREPARED)
@click.argument("output", type=A_PATH)
@takes(Probing)
def probe(checkpoint: Path, data: Path, output: Path, settings: Probing) -> None:
    """Measure how well linear probes tell the classes of DATA's images from each layer of CHECKPOINT's model.

    A logistic regression learns on the training split from the means, over all pixels, of the inputs of each layer. The
    validation split selects the strength of its regularisation. The accuracy on raw pixels is given for comparison.
    OUTPUT receives probe.json and probe.png.
    """
    from lazyformer_fairseq.language_modeling import probe as probing

    results = probing.probe_layers(checkpoint, data, settings.images, settings.batch_size, settings.device)
    probing.write(results, output)
    click.echo(probing.table(results))
