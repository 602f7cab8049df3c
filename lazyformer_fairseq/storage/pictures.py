"""The look that pictures share, and the one place that writes them."""

import itertools
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

from lazyformer_fairseq.storage.atomic import atomic_file

# Okabe and Ito's colours, which colour-blind readers tell apart; each also has a mark of its own.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKS = ("o", "s", "^", "D", "v", "P", "X")


def looks(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """By name a colour and a mark, as matplotlib takes them: no pair comes twice among the first 42."""
    pairs = zip(itertools.cycle(COLOURS), itertools.cycle(MARKS), strict=False)
    return {name: {"color": colour, "marker": mark} for name, (colour, mark) in zip(names, pairs, strict=False)}


def write_picture(figure: Figure, path: Path) -> None:
    """Writes a PNG, whole or not at all."""
    with atomic_file(path) as file:
        figure.savefig(file, dpi=150, bbox_inches="tight", format="png")
