"""Markdown pages for reports, which consist of tables, notes, pictures and paragraphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.atomic import write_text


@dataclass(frozen=True)
class Notes:
    """Notes on the tables, rendered as a bulleted list."""

    sentences: Sequence[str]


@dataclass(frozen=True)
class Picture:
    """A picture in the same folder as the page."""

    name: str


Block = Table | Notes | Picture | str  # a str is a paragraph, or a heading such as "# Results"


def markdown(blocks: Sequence[Block], pictures: bool = True) -> str:
    """Render the page as Markdown with a final newline; pictures can be omitted, for the terminal."""
    shown = [block for block in blocks if pictures or not isinstance(block, Picture)]
    return "\n\n".join(text for text in map(_as_markdown, shown) if text) + "\n"


def write_page(blocks: Sequence[Block], folder: Path, stem: str) -> str:
    """Write the page to STEM.md atomically, and return it without pictures, for the terminal."""
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
