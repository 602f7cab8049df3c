"""A checkpoint to start from, and files of several articles, for grids of runs on SQuAD in miniature."""

from pathlib import Path

from helpers import ROOT
from toy_squad import article, write_squad

START = ROOT / "tests" / "fixtures" / "checkpoint_of_0.1.0" / "checkpoint_last.pt"  # it has 64 positions
SIZES = ("--max-length", "64")
NAMES = ("Anna", "Otto", "Maria", "Peter", "Clara", "Emil")
THINGS = ("garden", "river", "house", "tower", "bridge")


def toy_article(number: int) -> dict:
    """Who sees what: two paragraphs of three questions."""
    paragraphs = []
    for part in range(2):
        pairs = [(NAMES[(number + part + place) % 6], THINGS[(number + place) % 5]) for place in range(3)]
        context = " ".join(f"{name} sees the {thing}." for name, thing in pairs)
        paragraphs.append((context, [(f"Who sees the {thing}?", name) for name, thing in pairs]))
    return article(f"Article {number}", *paragraphs)


def write_articles(folder: Path, train: int = 8, dev: int = 2) -> Path:
    """A folder as the official download: articles to train on, and others to validate on. Returns `folder`."""
    write_squad(folder / "train-v1.1.json", *map(toy_article, range(train)))
    write_squad(folder / "dev-v1.1.json", *map(toy_article, range(train, train + dev)))
    return folder
