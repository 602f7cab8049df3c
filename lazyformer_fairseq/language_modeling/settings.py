"""Options for converting images to sequences."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.options import option


@dataclass(frozen=True)
class Preparing:
    """Options of ``lazyformer lm prepare-images``."""

    side: int = option(32, "Width and height of the images in pixels, after resizing.", low=1, high=1024)
    colours: int = option(512, "Maximum number of colors in the palette.", low=2, high=60_000)
    valid: float = option(
        0.05,
        "Fraction of the images to use for validation if SOURCE has no folder called valid.",
        low=0,
        high=0.9,
    )
    test: float = option(
        0.05,
        "Fraction of the images to use for testing if SOURCE has no folder called test.",
        low=0,
        high=0.9,
    )
    seed: int = option(1, "Random seed for the splits and for k-means.", low=0)
    palette: Optional[Path] = option(
        None,
        "Prepared folder to take the palette from, so that models trained on that folder also work with OUT.",
    )
