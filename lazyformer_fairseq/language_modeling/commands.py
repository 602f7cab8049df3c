"""The ``lazyformer lm`` commands, which prepare text and images, evaluate models, sample from them and probe them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import CONFIGS, ExistingPath
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.language_modeling.settings import Preparing
from lazyformer_fairseq.options import DEVICE, Choice, Group, check, option, with_options_from
from lazyformer_fairseq.storage import checked
from lazyformer_fairseq.storage.atomic import refuse_filled_folder

A_PATH = click.Path(path_type=Path)
PREPARED = ExistingPath(
    "no such file; pass a folder written by `lazyformer lm prepare`",
    holds="manifest.json",
)
CORPORA = ("wikitext", "enwik8", "text8")


@click.group(cls=Group)
def lm() -> None:
    r"""Prepare data for text and image language models, evaluate the models, and sample from them.

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
    help="Reject any text other than this one.  [default: accept any text, and report whether it is an official one]",
)
def prepare(corpus: str, source: Path, out: Path, official: Optional[str]) -> None:
    r"""Convert WikiText, enwik8 or text8 to a folder OUT for fairseq-train and `lazyformer lm evaluate`.

    \b
    wikitext  WikiText-2 or -103 as words; SOURCE contains wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens
    enwik8    bytes, split into 90, 5 and 5 million; SOURCE is the file or its folder
    text8     characters, split into 90, 5 and 5 million; SOURCE is the file or its folder

    OUT is written atomically; its manifest.json contains the counts.
    """
    refuse_filled_folder(out)
    from lazyformer_fairseq.language_modeling import prepare as steps

    click.echo(steps.overview(steps.prepare(corpus, source, out, official)))


@lm.command("prepare-images")
@click.argument("source", type=ExistingPath())
@click.argument("out", type=A_PATH)
@with_options_from(Preparing)
def prepare_images(source: Path, out: Path, settings: Preparing) -> None:
    """Convert images to a folder OUT for models such as igpt_s, with each pixel encoded as a color from a palette.

    SOURCE is a folder of image files (PNG, JPEG, ...) or of .npy arrays of shape (N, height, width) or (N, height,
    width, 3), which contain uint8 values or numbers from 0 to 1. Classes for `lazyformer lm probe` are defined by one
    folder per class, or by labels.npy with one label per image in file order. If SOURCE has folders called train,
    valid and test, they are the splits; otherwise, the images are assigned to splits at random.

    The palette is found by k-means on training pixels. If the images have few enough colors, the palette consists of
    exactly those colors.

    OUT is written atomically. Its dict.txt and palette.npy contain the colors.
    """
    refuse_filled_folder(out)
    if not source.is_dir():
        raise UserError(f"{source} is not a folder; pass the folder that contains the images")
    if settings.palette is not None:
        PREPARED.convert(settings.palette, None, None)
    from lazyformer_fairseq.language_modeling import images

    click.echo(images.overview(images.prepare_images(source, out, settings)))


TRAINING_S = "same as during training"


@dataclass(frozen=True)
class Reading:
    """Options of ``lazyformer lm evaluate`` that determine how the text is read."""

    split: str = option("test", "Split of DATA to evaluate.", choices=("train", "valid", "test"))
    lengths: Optional[str] = option(
        None,
        "Set the next four options to the paper's values (base, large or 24b) or to those in a YAML file. Options on "
        "the command line take precedence.",
        metavar="NAME",
    )
    tgt_len: Optional[int] = option(None, "Number of tokens to predict at once.", low=1, shown=TRAINING_S)
    mem_len: Optional[int] = option(None, "Number of preceding tokens in memory.", low=0, shown=TRAINING_S)
    clamp_len: Optional[int] = option(
        None, "Maximum relative distance; larger distances are clamped to it. 0 for no limit.", low=-1, shown=TRAINING_S
    )
    same_length: Optional[bool] = option(
        None,
        "Make every query attend to itself and exactly the --mem-len tokens before it, instead of all earlier tokens "
        "in the memory and the segment.",
        shown=TRAINING_S,
    )
    batch_size: int = option(
        1,
        "Number of streams to process in parallel. More streams are faster and give the same result up to rounding.",
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
    """Read the lengths from a YAML file or from a preset in ``configs/language_modeling/evaluation``.

    Raises:
        UserError: there is no such file, or it contains any other setting.
    """
    folder = CONFIGS / "language_modeling" / "evaluation"
    path = next(filter(Path.is_file, (Path(name), folder / f"{name}.yaml")), None)
    if path is None:
        known = [each.stem for each in sorted(folder.glob("*.yaml"))]
        raise UserError(f"--lengths {name}: neither a file nor one of {', '.join(known)}{nearest(name, known)}")
    remedy = "set tgt_len, mem_len and clamp_len to numbers, and same_length to true or false"
    given = checked.read_yaml(path, remedy)
    checked.as_type(Lengths, given, path, remedy)
    check(replace(Reading(), **given))
    return given


@lm.command()
@click.argument("checkpoint", type=ExistingPath("no such checkpoint", is_file=True))
@click.argument("data", type=PREPARED)
@with_options_from(Reading)
def evaluate(checkpoint: Path, data: Path, settings: Reading) -> None:
    r"""Measure CHECKPOINT's perplexity per word or bits per character over all tokens in a split of DATA.

    The result is defined for a batch size of 1. With more streams, each stream first reads the text that would be in
    memory at a batch size of 1.

    \b
    --lengths (paper)         --tgt-len --mem-len --clamp-len
    base on WikiText-103            64       640         400
    large on WikiText-103          128      1600        1000
    24b on enwik8 and text8         80      2100         820

    All of them use --same-length, as the authors' configurations do during evaluation but not during training.

    \b
    lazyformer lm evaluate checkpoints/par_transformer_base/checkpoint_best.pt data/wikitext-103 --lengths base
    """
    of_file = {}
    if settings.lengths is not None:
        of_file = read_lengths(settings.lengths)
    if settings.json is not None and not settings.json.absolute().parent.is_dir():
        raise UserError(f"--json {settings.json}: the file's folder does not exist; create the folder first")
    from lazyformer_fairseq.data.datasets.token_streams import item_length, open_tokens
    from lazyformer_fairseq.language_modeling import evaluate as evaluation
    from lazyformer_fairseq.language_modeling.prepare import read_manifest
    from lazyformer_fairseq.storage.json_files import write_json

    unit = read_manifest(data)["unit"]
    tokens = open_tokens(data / settings.split)
    model, dictionary, tgt_len = evaluation.load_model(checkpoint, data, settings.device)
    used = {"tgt_len": tgt_len}
    used |= {name: getattr(model.cfg, name) for name in ("mem_len", "clamp_len", "same_length")}
    on_command_line = {name: getattr(settings, name) for name in used}
    used |= of_file
    used |= {name: value for name, value in on_command_line.items() if value is not None}

    item = item_length(data)
    result = evaluation.evaluate(model, tokens, dictionary.eos(), **used, batch_size=settings.batch_size, item=item)
    if settings.json is not None:
        write_json(
            settings.json,
            {
                "checkpoint": str(checkpoint),
                "data": str(data),
                "split": settings.split,
                "unit": unit,
                **used,
                "batch_size": settings.batch_size,
                **result.as_json(),
            },
        )
    click.echo(evaluation.in_words(result, unit, settings.split))


@dataclass(frozen=True)
class Sampling:
    """Options of ``lazyformer lm sample``."""

    output: Optional[Path] = option(None, "For images: the PNG file to write.", shown="sample.png")
    count: int = option(8, "Number of images or texts to sample.", low=1)
    complete: bool = option(
        False,
        "For images: complete the lower halves of --count images from --split, four times each.",
    )
    split: str = option("test", "Split from which --complete takes the images.", choices=("train", "valid", "test"))
    prompt: str = option("", "For texts: the prompt, as symbols from dict.txt separated by spaces.")
    length: int = option(100, "For texts: number of tokens per text, including the prompt.", low=1)
    temperature: float = option(1.0, "Sampling temperature; 0 always selects the most likely token.", low=0)
    top_k: int = option(0, "Number of most likely colors or words to sample from (top-k); 0 for all.", low=0)
    seed: int = option(1, "Random seed for sampling.", low=0)
    device: Optional[str] = DEVICE()


@lm.command()
@click.argument("checkpoint", type=ExistingPath("no such checkpoint", is_file=True))
@click.argument("data", type=PREPARED)
@with_options_from(Sampling)
def sample(checkpoint: Path, data: Path, settings: Sampling) -> None:
    r"""Sample images or texts from CHECKPOINT, a model that was trained on DATA.

    \b
    lazyformer lm sample checkpoints/igpt_s/checkpoint_best.pt data/photographs --count 16
    lazyformer lm sample checkpoints/igpt_s/checkpoint_best.pt data/photographs --complete
    lazyformer lm sample checkpoints/par_transformer_base/checkpoint_best.pt data/wikitext-103 --prompt 'The war'

    With --complete, each row of the output shows the upper half, four completions, and the original image.
    """
    from lazyformer_fairseq.data.datasets.token_streams import item_length
    from lazyformer_fairseq.language_modeling import sample as sampling

    item = item_length(data)
    if item and settings.prompt:
        raise UserError(f"{data} contains images; --complete is for images, and --prompt is for texts")
    if not item and settings.complete:
        raise UserError(f"{data} contains a text; --complete is for images, and --prompt is for texts")
    how = {name: getattr(settings, name) for name in ("temperature", "top_k", "seed", "device")}
    writer = sampling.Writer.load(checkpoint, data, **how)
    if not item:
        texts = writer.texts(settings.prompt, settings.count, settings.length)
        click.echo("\n\n".join(texts))
        return

    path = settings.output or Path("sample.png")
    split = None
    images = "images"
    if settings.complete:
        split = settings.split
        images = "completed images"
    writer.draw(path, settings.count, split)
    click.echo(f"{path}: {settings.count} {images} of {item} pixels")


@dataclass(frozen=True)
class Probing:
    """Options of ``lazyformer lm probe``."""

    images: int = option(20_000, "Maximum number of images per split.", low=2)
    batch_size: int = option(32, "Number of images per forward pass.", low=1)
    device: Optional[str] = DEVICE()


@lm.command()
@click.argument("checkpoint", type=ExistingPath("no such checkpoint", is_file=True))
@click.argument("data", type=PREPARED)
@click.argument("output", type=A_PATH)
@with_options_from(Probing)
def probe(checkpoint: Path, data: Path, output: Path, settings: Probing) -> None:
    """Measure the accuracy of linear probes that classify DATA's images from each layer of CHECKPOINT's model.

    For each layer, a logistic regression is fitted on the training split; its features are the layer's input, averaged
    over all pixels. The regularization strength is selected on the validation split. For comparison, the accuracy on
    raw pixels is also reported. OUTPUT will contain probe.json and probe.png.
    """
    from lazyformer_fairseq.language_modeling import probe as probing

    results = probing.probe_layers(checkpoint, data, settings.images, settings.batch_size, settings.device)
    probing.write(results, output)
    click.echo(probing.table(results))
