"""A report's page: tables, notes and pictures in the order in which they are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.atomic import write_text


@dataclass(frozen=True)
class Notes:
    """Sentences that a reader must know beside the tables, a bullet each."""

    sentences: Sequence[str]


@dataclass(frozen=True)
class Picture:
    """A picture that stands in the folder of the page."""

    name: str


Block = Table | Notes | Picture | str  # a str is a paragraph, or a heading such as "# Results"


def markdown(blocks: Sequence[Block], pictures: bool = True) -> str:
    """Return the page in Markdown, with a line's end behind it. A screen shows no pictures: leave them out there."""
    shown = [block for block in blocks if pictures or not isinstance(block, Picture)]
    return "\n\n".join(text for text in map(_as_markdown, shown) if text) + "\n"


def write_page(blocks: Sequence[Block], folder: Path, stem: str) -> str:
    """Write STEM.md, whole; returns what a screen shows of it."""
    write_text(folder / f"{stem}.md", markdown(blocks))
    return markdown(blocks, pictures=False)


def _as_markdown(block: Block) -> str:
    if isinstance(block, Table):
        if block.title:
            return f"## {block.title}\n\n{block.printed()}"
        return block.printed()
    if isinstance(block, Notes):
        return "\n".join(f"- {sentence}" for sentence in block.sentences)
    if isinstance(block, Picture):
        return f"![{Path(block.name).stem}]({block.name})"
    return block
