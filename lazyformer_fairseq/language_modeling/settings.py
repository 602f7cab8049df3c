"""Options of turning images into sequences, shared by commands and steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.options import option


@dataclass(frozen=True)
class Preparing:
    """Options of ``lazyformer lm prepare-images``."""

    side: int = option(32, "Width and height of the images in pixels, after resizing.", low=1, high=1024)
    colours: int = option(512, "Maximum number of colours in the palette.", low=2, high=60_000)
    valid: float = option(
        0.05,
        "Share of the images for validation, if SOURCE has no folder valid.",
        low=0,
        high=0.9,
    )
    test: float = option(
        0.05,
        "Share of the images for testing, if SOURCE has no folder test.",
        low=0,
        high=0.9,
    )
    seed: int = option(1, "Random seed of the splits and of k-means.", low=0)
    palette: Optional[Path] = option(
        None,
        "Use the palette of this prepared folder, so that its models can read OUT.",
    )
