"""Images -> sequences of colours, in a language model's files (Chen et al., 2020, section 3.2: image GPT).

Each image is resized, and each of its pixels becomes the nearest colour of a palette, which k-means finds in training
pixels; where these have no more colours than the palette may, it is their own. An image is one item of the split's
files, row after row from its left upper pixel on. Symbols of the dictionary are the colours, ``#rrggbb``, the most
frequent first, so whoever has the dictionary has the palette.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from PIL import Image, ImageOps
from scipy.spatial import cKDTree
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor

from lazyformer_fairseq.data.datasets.token_streams import open_tokens
from lazyformer_fairseq.data.prepared_folder import MANIFEST
from lazyformer_fairseq.data.text.dictionary_file import Dictionary, load_dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.language_modeling.prepare import SPLITS
from lazyformer_fairseq.language_modeling.settings import Preparing
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.arrays import map_array
from lazyformer_fairseq.storage.atomic import atomic_file, atomic_folder
from lazyformer_fairseq.storage.indexed_format import type_of_ids, write_items
from lazyformer_fairseq.storage.json_files import write_json

# Pillow would try all that it knows, and start Ghostscript for some.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
# Decoded, a pixel takes up to 16 bytes: a reader's own canvas, the picture, its copy in RGB.
MOST_PIXELS = 1 << 26
# beyond the first number the file must have as many bytes as photographs
USUAL_PIXELS = 1 << 24
PIXELS_PER_BYTE = 200
PICTURES = frozenset(f".{kind}" for kind in "png jpg jpeg bmp gif webp tif tiff ppm pgm".split())
ARRAY = ".npy"
LABELS = "labels.npy"
PALETTE = "palette.npy"
FITTED = 1_000_000  # pixels that k-means sees
COUNTED = 50_000  # images of a split, of which neighbours are counted
BLOCK = 512  # images at a time
Pixels = np.ndarray  # uint8 (images, side, side, 3)


class Found(NamedTuple):
    """Files of images, how many each holds, and classes: a name for each image, or none."""

    files: list[Path]
    counts: list[int]
    classes: Optional[np.ndarray]

    def images(self) -> int:
        return sum(self.counts)


def prepare_images(source: Path, out: Path, how: Preparing) -> dict[str, Any]:
    """Write the splits, their labels, dictionary, palette and manifest into `out`, whole or not at all.

    Args:
        source: a folder of pictures and arrays, of folders of these by class, or of folders ``train``, ``valid`` and
            ``test`` of either.

    Returns:
        The manifest.

    Raises:
        UserError: a file that is no image, too few images, labels that do not fit; it names the file.
    """
    inner = {path.name: path for path in source.iterdir() if path.is_dir()}
    has_splits = {"train"} <= inner.keys() <= {*SPLITS}
    places = {split: inner[split] for split in SPLITS if split in inner} if has_splits else {"": source}
    found = {split: find_images(place) for split, place in places.items()}
    if len({part.classes is None for part in found.values()}) > 1:
        raise UserError(f"{source}: some of its splits have labels, others none")
    chosen = _share_out(source, found, how)
    total = sum(map(Found.images, found.values()))
    files = [file for part in found.values() for file in part.files]
    with (
        atomic_folder(out) as folder,
        Progress(total=total, desc="reading", unit=" images") as bar,
    ):
        shape = (total, how.side, how.side, 3)
        pixels = np.lib.format.open_memmap(scratch := folder / "pixels.npy", "w+", np.uint8, shape)
        for number, image in enumerate(_read(files, how.side)):
            pixels[number] = image
            bar.update()
        dictionary = _dictionary(pixels, chosen["train"], how)
        dictionary.save(folder / "dict.txt")
        np.save(folder / PALETTE, palette_of(dictionary))
        manifest: dict[str, Any] = {
            "corpus": "images",
            "unit": "pixel",
            "source": str(source.absolute()),
        }
        manifest |= {
            "vocabulary": len(dictionary) - dictionary.nspecial,
            "side": how.side,
            "item": how.side**2,
        }
        manifest |= {"classes": _write_labels(folder, found, chosen), "splits": {}}
        for split, images in chosen.items():
            _write_split(folder / split, pixels, images, dictionary)
            texts = (open_tokens(folder / part) for part in ("train", split))
            bits = neighbour_bits(*texts, how.side, len(dictionary))
            counts = {
                "tokens": len(images) * how.side**2,
                "items": len(images),
                "unknown": 0,
            }
            manifest["splits"][split] = {**counts, "neighbour_bits": round(bits, 4)}
        del pixels
        scratch.unlink()
        write_json(folder / MANIFEST, manifest)
    return manifest


def find_images(folder: Path) -> Found:
    """Return the images of a folder, in the order of their names.

    Raises:
        UserError: there is none, or their classes are said twice, or not of each.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _is_image(path))
    if not files:
        raise UserError(f"{folder}: holds no picture ({', '.join(sorted(PICTURES))}) and no array ({ARRAY})")
    counts = [len(_images_of(path)) if path.suffix == ARRAY else 1 for path in files]
    inner = {path.relative_to(folder).parts[0] for path in files if path.parent != folder}
    beside = [path for path in files if path.parent == folder]
    labels = folder / LABELS
    beside += [labels] if labels.is_file() else []
    if inner and beside:
        raise UserError(f"{beside[0]}: stands beside folders of images, such as {min(inner)}, which are classes")
    classes = np.repeat([path.relative_to(folder).parts[0] for path in files], counts) if inner else None
    if beside[-1:] == [labels]:
        array = map_array(labels, "give a label for each image, numbers or words", kinds="biufUS", ndim=1)
        if len(array) != sum(counts):
            raise UserError(f"{labels}: has the shape {array.shape}, but there are {sum(counts):,} images beside it")
        classes = array.astype(str)
    return Found(files, counts, classes)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in PICTURES or (path.suffix == ARRAY and path.name != LABELS)


def _images_of(path: Path) -> np.ndarray:
    """Return (N, H, W) or (N, H, W, 3); of an array that is one image, N is 1."""
    array = map_array(path, "give images as np.save writes them", kinds="iuf")
    is_one = array.ndim == 2 or (array.ndim == 3 and array.shape[-1] == 3)
    array = array[None] if is_one else array
    if array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[-1] != 3) or 0 in array.shape:
        raise UserError(f"{path}: has the shape {array.shape}; images are (N, height, width), in colours (..., 3)")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"{path}: is {array.dtype}; give uint8, 0 to 255, or numbers from 0 to 1 with a fraction")
    return array


def _read(files: Sequence[Path], side: int) -> Iterator[np.ndarray]:
    """Return each image as uint8 (side, side, 3): the middle square, each pixel the mean of those that it replaces."""
    for path in files:
        for image in _pictures(path):
            if image.size != (side, side):
                image = ImageOps.fit(image, (side, side), Image.Resampling.BOX)
            yield np.asarray(image)


def _pictures(path: Path) -> Iterator[Image.Image]:
    if path.suffix != ARRAY:
        try:
            with Image.open(path, formats=FORMATS) as image:
                _refuse_large(path, *image.size)
                if image.mode.startswith(("I", "F")):
                    raise UserError(f"{path}: has more than 8 bits a channel ({image.mode}); give an array from 0 to 1")
                ImageOps.exif_transpose(image, in_place=True)  # upright, however the camera was held
                yield image if image.mode == "RGB" else image.convert("RGB")
        except UserError:
            raise
        except Exception as error:  # a damaged picture makes Pillow's readers raise anything
            raise UserError(f"{path}: no picture: {error}") from None
        return
    for number, each in enumerate(_images_of(path)):
        if each.dtype != np.uint8:
            if not (each.min() >= 0 and each.max() <= 1):
                raise UserError(f"{path}: image {number} has numbers beyond 0 to 1; divide all, or give uint8")
            each = np.rint(each * 255).astype(np.uint8)
        yield Image.fromarray(np.ascontiguousarray(each)).convert("RGB")


def _refuse_large(path: Path, width: int, height: int) -> None:
    """Raise a UserError, before anything is decoded, for a picture that would take a gigabyte, or much for its file."""
    pixels = width * height
    if pixels > min(MOST_PIXELS, max(USUAL_PIXELS, PIXELS_PER_BYTE * path.stat().st_size)):
        raise UserError(
            f"{path}: stands for {width:,} x {height:,} pixels in {path.stat().st_size:,} bytes; make it smaller, or "
            "leave it out"
        )


def _share_out(source: Path, found: Mapping[str, Found], how: Preparing) -> dict[str, np.ndarray]:
    """Return which images are of which split: those of its folder, or so many that are drawn of the training's."""
    places = {}
    start = 0
    for split, part in found.items():
        places[split] = np.arange(start, start := start + part.images())
    rest = places.pop("", places.get("train"))
    drawn = np.random.default_rng(how.seed).permutation(rest)
    for split in ("valid", "test"):
        if split not in places:
            count = round(len(rest) * getattr(how, split))
            places[split] = np.sort(drawn[:count])
            drawn = drawn[count:]
    places["train"] = np.sort(drawn)
    if empty := [split for split in SPLITS if not len(places[split])]:
        raise UserError(f"{source}: {start:,} images leave none for {empty[0]}; give more, or other shares")
    return {split: places[split] for split in SPLITS}


def _write_labels(folder: Path, found: Mapping[str, Found], chosen: Mapping[str, np.ndarray]) -> list[str]:
    """``SPLIT.labels.npy``, numbers of the classes that are returned; none where images have no labels."""
    if next(iter(found.values())).classes is None:
        return []
    names, numbers = np.unique(np.concatenate([part.classes for part in found.values()]), return_inverse=True)
    for split, images in chosen.items():
        np.save(folder / f"{split}.{LABELS}", numbers[images])
    return names.tolist()


# Colours


def _blocks(pixels: Pixels, images: np.ndarray) -> Iterator[np.ndarray]:
    """Return (images, pixels) of some images at a time, each colour one number."""
    for start in range(0, len(images), BLOCK):
        red, green, blue = np.moveaxis(pixels[images[start : start + BLOCK]].astype(np.int32), -1, 0)
        yield ((red << 16) + (green << 8) + blue).reshape(len(red), -1)


def _apart(colours: np.ndarray) -> np.ndarray:
    """Numbers (N,) -> red, green, blue (N, 3)."""
    return np.stack([colours >> 16, colours >> 8 & 255, colours & 255], -1)


def _dictionary(pixels: Pixels, images: np.ndarray, how: Preparing) -> Dictionary:
    """Of the palette that is given, or that of the training images."""
    if how.palette is not None:
        palette_of(dictionary := load_dictionary(how.palette / "dict.txt"))
        return dictionary
    counts = np.zeros(1 << 24, np.int64)
    for block in _blocks(pixels, images):
        found, often = np.unique(block, return_counts=True)
        counts[found] += often
    palette = there = np.flatnonzero(counts)
    if len(there) > how.colours:
        pixels_seen = min(FITTED, int(counts.sum()))
        sample = np.random.default_rng(how.seed).choice(there, pixels_seen, p=counts[there] / counts.sum())
        means = MiniBatchKMeans(how.colours, batch_size=8192, n_init=1, random_state=how.seed).fit(_apart(sample))
        red, green, blue = np.rint(means.cluster_centers_).astype(np.int32).clip(0, 255).T
        palette = np.unique((red << 16) + (green << 8) + blue)
    nearest = cKDTree(_apart(palette)).query(_apart(there))[1]
    often = np.bincount(nearest, counts[there], len(palette)).astype(np.int64)
    dictionary = Dictionary()
    for place in np.lexsort((palette, -often)):
        dictionary.add_symbol(f"#{palette[place]:06x}", n=int(often[place]))
    return dictionary


def palette_of(dictionary: Dictionary) -> np.ndarray:
    """uint8 (colours, 3), of the ids from ``nspecial`` on. Raises a UserError where a symbol is no colour."""
    symbols = dictionary.symbols[dictionary.nspecial :]
    try:
        return _apart(np.array([int(symbol.removeprefix("#"), 16) for symbol in symbols])).astype(np.uint8)
    except ValueError:
        raise UserError(
            "the dictionary's symbols are no colours; give a folder that `lazyformer lm prepare-images` wrote"
        ) from None


def _write_split(prefix: Path, pixels: Pixels, images: np.ndarray, dictionary: Dictionary) -> None:
    tree = cKDTree(palette_of(dictionary))

    def encoded() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for block in _blocks(pixels, images):
            there, places = np.unique(block, return_inverse=True)
            ids = tree.query(_apart(there))[1][places.reshape(-1)] + dictionary.nspecial
            yield ids, np.full(len(block), block.shape[1])

    write_items(prefix, type_of_ids(len(dictionary)), encoded(), durable=False)


def neighbour_bits(train: np.ndarray, held_out: np.ndarray, side: int, symbols: int) -> float:
    """Bits a pixel of `held_out` where each is predicted by its left and its upper neighbour, counted in `train`.

    Add-one smoothing. Of many images some are counted.

    Args:
        train, held_out: ids of images, one after the other.
        symbols: of the dictionary; an id that is no colour stands for what is beyond the border.
    """
    colours = symbols - Dictionary().nspecial

    def seen(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images = tokens.reshape(-1, side, side)
        images = images[places_drawn(len(images), COUNTED)].astype(np.int64)
        left = np.pad(images, ((0, 0), (0, 0), (1, 0)))[:, :, :-1]
        above = np.pad(images, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        context = (left * symbols + above).ravel()
        return context, context * symbols + images.ravel()

    (contexts, pairs) = seen(train)
    (asked, of) = seen(held_out)
    times = [_counted(*each) for each in ((pairs, of), (contexts, asked))]
    return float(-np.log2((times[0] + 1) / (times[1] + colours)).mean())


def places_drawn(count: int, most: int) -> np.ndarray:
    """Return random places of at most so many images, always the same: files may order them by class."""
    return np.sort(np.random.default_rng(1).permutation(count)[:most])


def _counted(values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Return how often each of `asked` is among `values`."""
    known, counts = np.unique(values, return_counts=True)
    places = np.searchsorted(known, asked).clip(max=len(known) - 1)
    return np.where(known[places] == asked, counts[places], 0)


def overview(manifest: Mapping[str, Any]) -> str:
    """Return the manifest in words."""
    names = {
        "items": "images",
        "tokens": "pixels",
        "neighbour_bits": "bits a pixel by its neighbours",
    }
    rows = [{"split": split, **{name: f"{counts[key]:,}" for key, name in names.items()}}
            for split, counts in manifest["splits"].items()]  # fmt: skip
    classes = f"; {len(manifest['classes'])} classes" if manifest["classes"] else ""
    side = manifest["side"]
    return f"{Table('', rows).printed('simple')}\n{manifest['vocabulary']} colours, {side} x {side} pixels{classes}"


# Pictures of images


def as_images(ids: Tensor, dictionary: Dictionary) -> np.ndarray:
    """uint8 (N, side, side, 3) from ids of colours (N, side side)."""
    side = math.isqrt(ids.size(1))
    return palette_of(dictionary)[ids.numpy() - dictionary.nspecial].reshape(-1, side, side, 3)


def beside(halves: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Rows (N, 2 + completions, ...): an image's upper half, its completions, and itself."""
    given = halves.copy()
    given.reshape(len(given), -1, 3)[:, halves[0].size // 6 :] = 128
    return np.concatenate(
        [
            given[:, None],
            drawn.reshape(len(halves), -1, *halves.shape[1:]),
            halves[:, None],
        ],
        1,
    )


def write_grid(images: np.ndarray, columns: int, path: Path) -> None:
    """Return a PNG of images, uint8 (N, side, side, 3), so many in a row; pixels of small ones are squares."""
    zoom = max(1, math.ceil(96 / images.shape[1]))
    large = (
        np.pad(images, ((0, -len(images) % columns), *[(0, 0)] * 3), constant_values=255)
        .repeat(zoom, 1)
        .repeat(zoom, 2)
    )
    large = np.pad(large, ((0, 0), (0, 4), (0, 4), (0, 0)), constant_values=255)
    rows = large.reshape(-1, columns, *large.shape[1:]).swapaxes(1, 2)
    with atomic_file(path) as file:
        Image.fromarray(rows.reshape(-1, columns * large.shape[2], 3)).save(file, "PNG")
