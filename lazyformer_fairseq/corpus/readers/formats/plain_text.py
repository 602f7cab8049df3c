"""Plain text: documents divided by blank lines, each of them one paragraph, hard-wrapped or not."""

import re
from collections.abc import Iterator

from lazyformer_fairseq.corpus.readers.blocks import Block, Piece, Watch, decode

# Books break "well-known" after its hyphen, never inside "known": the hyphen is the word's own and stays.
HYPHEN_AT_LINE_END = re.compile(r"-(?<=[^\W\d_]-)[^\S\n]*\n\s*(?=[a-zß-öø-ÿ])")
BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")


def join_hard_wrapped(text: str) -> str:
    """One paragraph from lines that were broken to fit a page."""
    return " ".join(HYPHEN_AT_LINE_END.sub("-", text).split())


def blocks_to_paragraphs(text: str) -> str:
    """One paragraph a line, from hard-wrapped paragraphs that blank lines divide."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    paragraphs = (join_hard_wrapped(block) for block in BLANK_LINES.split(text))
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


def lines_to_paragraphs(text: str) -> str:
    """One paragraph a line, from lines that are paragraphs already: drops blank lines and superfluous space."""
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def starts_document(line: bytes, after_blank: bool) -> bool:
    return after_blank and not line.isspace()


def parse(block: Block, piece: Piece, watch: Watch) -> Iterator[tuple[str, dict]]:
    text = join_hard_wrapped(decode(block.content, watch))
    if text or not block.is_preamble:
        yield text, {}
