"""Conversion of images to sequences of colors for a language model (image GPT; Chen et al., 2020, section 3.2).

Each image is resized, and each pixel is replaced by the nearest color in a palette. The palette is found by k-means on
training pixels; if these have few enough colors, the palette consists of exactly those. Each image is one item in its
split's files, with its pixels row by row from the top left. The dictionary's symbols are the colors, ``#rrggbb``, most
frequent first, so the dictionary contains the palette.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
from PIL import Image, ImageOps
from scipy.spatial import cKDTree
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor

from lazyformer_fairseq.data.prepared_folder import MANIFEST
from lazyformer_fairseq.data.text.dictionary_file import Dictionary, load_dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.language_modeling.prepare import SPLITS, ItemBlocks, write_split
from lazyformer_fairseq.language_modeling.settings import Preparing
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.arrays import map_array
from lazyformer_fairseq.storage.atomic import atomic_file, atomic_folder
from lazyformer_fairseq.storage.json_files import write_json

# Without this limit, Pillow would try all formats that it supports, and run Ghostscript for some.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
# A decoded pixel takes up to 16 bytes: in the decoder's own canvas, in the image, and in the image's RGB copy.
MOST_PIXELS = 1 << 26
USUAL_PIXELS = 1 << 24
PIXELS_PER_BYTE = 200  # an image with more than the usual number of pixels must have as many bytes as a photograph
PICTURES = frozenset(
    (
        ".png",
        ".jpg",
        ".jpeg",
        ".bmp",
        ".gif",
        ".webp",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
    )
)
ARRAY = ".npy"
LABELS = "labels.npy"
PALETTE = "palette.npy"
FITTED = 1_000_000  # maximum number of pixels for k-means
BLOCK = 512  # number of images to process at once


@dataclass(frozen=True)
class Found:
    """The images found in a folder.

    Attributes:
        files: their files, in name order.
        counts: number of images per file.
        classes: name of each image's class; None if there are no classes.
    """

    files: list[Path]
    counts: list[int]
    classes: Optional[np.ndarray]

    def images(self) -> int:
        """Return the number of images."""
        return sum(self.counts)


def prepare_images(source: Path, out: Path, how: Preparing) -> dict[str, Any]:
    """Write the splits with their labels, dictionary, palette and manifest to `out`, atomically.

    Args:
        source: a folder of image files and arrays, a folder with one such subfolder per class, or a folder with
            subfolders ``train``, ``valid`` and ``test`` of either form.
        out: the folder to write.
        how: size, palette and splits.

    Returns:
        The manifest.

    Raises:
        UserError: a file is not an image, there are too few images, or labels do not match the images; the message
            names the file.
    """
    inner = {path.name: path for path in source.iterdir() if path.is_dir()}
    places = {"": source}
    if {"train"} <= inner.keys() <= {*SPLITS}:
        places = {split: inner[split] for split in SPLITS if split in inner}
    found = {split: find_images(place) for split, place in places.items()}
    if len({part.classes is None for part in found.values()}) > 1:
        raise UserError(f"{source}: some splits have labels, but others have none")
    chosen = _assign_splits(source, found, how)
    total = sum(part.images() for part in found.values())
    files = [file for part in found.values() for file in part.files]

    with atomic_folder(out) as folder:
        scratch = folder / "pixels.npy"
        shape = (total, how.side, how.side, 3)
        pixels = np.lib.format.open_memmap(scratch, "w+", np.uint8, shape)
        images = Progress(_read(files, how.side), total=total, desc="reading", unit=" images")
        for number, image in enumerate(images):
            pixels[number] = image
        dictionary = _dictionary(pixels, chosen["train"], how)
        dictionary.save(folder / "dict.txt")
        np.save(folder / PALETTE, palette_of(dictionary))

        manifest = {
            "corpus": "images",
            "unit": "pixel",
            "source": str(source.absolute()),
            "vocabulary": len(dictionary) - dictionary.nspecial,
            "side": how.side,
            "item": how.side**2,
            "classes": _write_labels(folder, found, chosen),
            "splits": {},
        }
        for split, places_of_split in chosen.items():
            blocks = _encoded(pixels, places_of_split, dictionary)
            manifest["splits"][split] = write_split(folder / split, dictionary, blocks)
        del pixels
        scratch.unlink()
        write_json(folder / MANIFEST, manifest)
    return manifest


def find_images(folder: Path) -> Found:
    """Find the images in a folder, in name order.

    Raises:
        UserError: there are no images, or their classes are defined twice or not for every image.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _is_image(path))
    if not files:
        raise UserError(f"{folder} contains neither images ({', '.join(sorted(PICTURES))}) nor arrays ({ARRAY})")
    counts = [len(_images_of(path)) if path.suffix == ARRAY else 1 for path in files]

    labels = folder / LABELS
    in_folders = [path for path in files if path.parent != folder]
    beside = [path for path in (*files, labels) if path.parent == folder and path.is_file()]
    classes = None
    if in_folders:
        names = [path.relative_to(folder).parts[0] for path in files]
        if beside:
            raise UserError(
                f"{beside[0]}: this file is next to folders of images, such as {names[0]}, which are treated as classes"
            )
        classes = np.repeat(names, counts)
    elif labels.is_file():
        array = map_array(
            labels,
            "provide one label per image, as numbers or words",
            dtypes="biufUS",
            ndim=1,
        )
        if len(array) != sum(counts):
            raise UserError(f"{labels} has the shape {array.shape}, but there are {sum(counts):,} images next to it")
        classes = array.astype(str)
    return Found(files, counts, classes)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in PICTURES or (path.suffix == ARRAY and path.name != LABELS)


def _images_of(path: Path) -> np.ndarray:
    """Memory-map an array of images (N, H, W) or (N, H, W, 3); N is 1 for a single image."""
    array = map_array(path, "save the images with np.save", dtypes="iuf")
    if array.ndim == 2 or (array.ndim == 3 and array.shape[-1] == 3):
        array = array[None]
    is_gray = array.ndim == 3
    is_color = array.ndim == 4 and array.shape[-1] == 3
    if not (is_gray or is_color) or 0 in array.shape:
        raise UserError(f"{path} has the shape {array.shape}; use (N, height, width) or (N, height, width, 3)")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"{path} has the type {array.dtype}; use uint8 from 0 to 255, or floats from 0 to 1")
    return array


def _read(files: Sequence[Path], side: int) -> Iterator[np.ndarray]:
    """Yield each image as uint8 (side, side, 3): its central square, resized by averaging pixels."""
    for path in files:
        if path.suffix == ARRAY:
            images = _images_in_array(path)
        else:
            images = _picture(path)
        for image in images:
            square = image
            if image.size != (side, side):
                square = ImageOps.fit(image, (side, side), Image.Resampling.BOX)
            yield np.asarray(square)


def _picture(path: Path) -> Iterator[Image.Image]:
    """Yield the image in a file; raise a UserError if decoding the image would take a gigabyte."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            width, height = image.size
            size = path.stat().st_size
            if width * height > min(MOST_PIXELS, max(USUAL_PIXELS, PIXELS_PER_BYTE * size)):
                raise UserError(
                    f"{path} decodes to {width:,} x {height:,} pixels from {size:,} bytes; make the image "
                    "smaller, or exclude it"
                )
            if image.mode.startswith(("I", "F")):
                raise UserError(
                    f"{path} has more than 8 bits per channel ({image.mode}); use an array of floats from 0 to 1"
                )
            ImageOps.exif_transpose(image, in_place=True)  # turn it upright
            yield image if image.mode == "RGB" else image.convert("RGB")
    except UserError:
        raise
    except Exception as error:  # Pillow may raise any exception on a damaged image
        raise UserError(f"{path}: not a readable image: {error}") from None


def _images_in_array(path: Path) -> Iterator[Image.Image]:
    for number, values in enumerate(_images_of(path)):
        levels = values
        if values.dtype != np.uint8:
            if not (values.min() >= 0 and values.max() <= 1):
                raise UserError(f"{path}: image {number} has values outside 0 to 1; rescale all images, or use uint8")
            levels = np.rint(values * 255).astype(np.uint8)
        yield Image.fromarray(np.ascontiguousarray(levels)).convert("RGB")


def _assign_splits(source: Path, found: Mapping[str, Found], how: Preparing) -> dict[str, np.ndarray]:
    """Return the indices of each split's images: those in its folder, or a random sample of the training images."""
    places = {}
    total = 0
    for split, part in found.items():
        places[split] = np.arange(total, total + part.images())
        total += part.images()
    rest = places.pop("", places.get("train"))
    drawn = np.random.default_rng(how.seed).permutation(rest)
    for split in ("valid", "test"):
        if split not in places:
            count = round(len(rest) * getattr(how, split))
            places[split] = np.sort(drawn[:count])
            drawn = drawn[count:]
    places["train"] = np.sort(drawn)
    for split in SPLITS:
        if not len(places[split]):
            raise UserError(f"{source}: {total:,} images leave none for {split}; use more images or other fractions")
    return {split: places[split] for split in SPLITS}


def _write_labels(folder: Path, found: Mapping[str, Found], chosen: Mapping[str, np.ndarray]) -> list[str]:
    """Write class indices to ``SPLIT.labels.npy``; return the class names, or an empty list if there are no labels."""
    parts = [part.classes for part in found.values()]
    if parts[0] is None:
        return []
    names, numbers = np.unique(np.concatenate(parts), return_inverse=True)
    for split, images in chosen.items():
        np.save(folder / f"{split}.{LABELS}", numbers[images])
    return names.tolist()


# Colors


def _blocks(pixels: np.ndarray, images: np.ndarray) -> Iterator[np.ndarray]:
    """Yield blocks of images, with the color of each pixel as an integer, (images, pixels).

    Args:
        pixels: all images, uint8 (images, side, side, 3).
        images: indices of the images to yield.
    """
    for start in range(0, len(images), BLOCK):
        colours = pixels[images[start : start + BLOCK]].astype(np.int32)
        yield _packed(colours).reshape(len(colours), -1)


def _packed(colours: np.ndarray) -> np.ndarray:
    """Encode red, green and blue (..., 3) as one integer per color (...), the inverse of :func:`_apart`."""
    red = colours[..., 0]
    green = colours[..., 1]
    blue = colours[..., 2]
    return (red << 16) + (green << 8) + blue


def _apart(colours: np.ndarray) -> np.ndarray:
    """Split colors encoded as integers (N,) into red, green and blue (N, 3)."""
    red = colours >> 16
    green = colours >> 8 & 255
    blue = colours & 255
    return np.stack([red, green, blue], -1)


def _dictionary(pixels: np.ndarray, images: np.ndarray, how: Preparing) -> Dictionary:
    """Return the dictionary of the configured palette; by default, of a palette computed from the training images."""
    if how.palette is not None:
        dictionary = load_dictionary(how.palette / "dict.txt")
        palette_of(dictionary)  # raises an error if the symbols are not colors
        return dictionary
    counts = np.zeros(1 << 24, np.int64)
    for block in _blocks(pixels, images):
        colours, occurrences = np.unique(block, return_counts=True)
        counts[colours] += occurrences
    seen = np.flatnonzero(counts)
    palette = seen
    if len(seen) > how.colours:
        fitted = min(FITTED, int(counts.sum()))
        shares = counts[seen] / counts.sum()
        sample = np.random.default_rng(how.seed).choice(seen, fitted, p=shares)
        means = MiniBatchKMeans(how.colours, batch_size=8192, n_init=1, random_state=how.seed)
        means.fit(_apart(sample))
        centres = np.rint(means.cluster_centers_).astype(np.int32).clip(0, 255)
        palette = np.unique(_packed(centres))

    _, nearest = cKDTree(_apart(palette)).query(_apart(seen))
    frequencies = np.bincount(nearest, counts[seen], len(palette)).astype(np.int64)
    dictionary = Dictionary()
    for place in np.lexsort((palette, -frequencies)):
        dictionary.add_symbol(f"#{palette[place]:06x}", n=int(frequencies[place]))
    return dictionary


def palette_of(dictionary: Dictionary) -> np.ndarray:
    """Return a dictionary's palette, uint8 (colors, 3), for ids ``nspecial`` and up.

    Raises:
        UserError: a symbol is not a color.
    """
    symbols = dictionary.symbols[dictionary.nspecial :]
    try:
        colours = np.array([int(symbol.removeprefix("#"), 16) for symbol in symbols])
        return _apart(colours).astype(np.uint8)
    except ValueError:
        raise UserError(
            "the dictionary's symbols are not colors; pass a folder written by `lazyformer lm prepare-images`"
        ) from None


def _encoded(pixels: np.ndarray, images: np.ndarray, dictionary: Dictionary) -> ItemBlocks:
    """Yield, for each block of images, the ids of the nearest colors and the number of ids per image."""
    tree = cKDTree(palette_of(dictionary))
    for block in _blocks(pixels, images):
        colours, places = np.unique(block, return_inverse=True)
        _, nearest = tree.query(_apart(colours))
        ids = nearest[places.reshape(-1)] + dictionary.nspecial
        yield ids, np.full(len(block), block.shape[1])


def sample_indices(count: int, most: int) -> np.ndarray:
    """Return at most `most` image indices, sampled because files may be ordered by class; the seed is fixed."""
    return np.sort(np.random.default_rng(1).permutation(count)[:most])


def overview(manifest: Mapping[str, Any]) -> str:
    """Return a summary of the manifest: a table of the splits and a line about colors, size and classes."""
    rows = []
    for split, counts in manifest["splits"].items():
        rows.append(
            {
                "split": split,
                "images": f"{counts['items']:,}",
                "pixels": f"{counts['tokens']:,}",
            }
        )
    side = manifest["side"]
    text = f"{Table('', rows).printed('simple')}\n{manifest['vocabulary']} colors, {side} x {side} pixels"
    if manifest["classes"]:
        text += f"; {len(manifest['classes'])} classes"
    return text


# Image grids


def as_images(ids: Tensor, dictionary: Dictionary) -> np.ndarray:
    """Convert ids of colors (N, side * side) to images, uint8 (N, side, side, 3)."""
    side = math.isqrt(ids.size(1))
    places = ids.numpy() - dictionary.nspecial
    return palette_of(dictionary)[places].reshape(-1, side, side, 3)


def completion_rows(halves: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Return one row per image, (N, 2 + completions, ...): its upper half, its completions, and the image itself."""
    given = halves.copy()
    pixels = given.reshape(len(given), -1, 3)
    upper_half = pixels.shape[1] // 2
    pixels[:, upper_half:] = 128
    completions = drawn.reshape(len(halves), -1, *halves.shape[1:])
    return np.concatenate([given[:, None], completions, halves[:, None]], axis=1)


def write_grid(images: np.ndarray, columns: int, path: Path) -> None:
    """Write images, uint8 (N, side, side, 3), to a PNG file with `columns` per row; small images are enlarged."""
    side = images.shape[1]
    zoom = max(1, math.ceil(96 / side))
    enlarged = side * zoom
    tile = enlarged + 4  # with a white border at the bottom and on the right
    rows = math.ceil(len(images) / columns)
    grid = Image.new("RGB", (columns * tile, rows * tile), "white")
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        large = Image.fromarray(image).resize((enlarged, enlarged), Image.Resampling.NEAREST)
        grid.paste(large, (column * tile, row * tile))
    with atomic_file(path) as file:
        grid.save(file, "PNG")
