"""Options that turn images into sequences, shared by commands and steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.options import option


@dataclass(frozen=True)
class Preparing:
    """Options of ``lazyformer lm prepare-images``."""

    side: int = option(32, "Pixels of a row, and of a column, after resizing.", low=1, high=1024)
    colours: int = option(512, "The most of the palette.", low=2, high=60_000)
    valid: float = option(
        0.05,
        "Share of the images, where SOURCE has no folder valid.",
        low=0,
        high=0.9,
    )
    test: float = option(
        0.05,
        "Share of the images, where SOURCE has no folder test.",
        low=0,
        high=0.9,
    )
    seed: int = option(1, "Which images these are; k-means.", low=0)
    palette: Optional[Path] = option(
        None,
        "Take the palette of this prepared folder, so that its models read OUT.",
    )
