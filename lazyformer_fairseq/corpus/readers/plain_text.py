"""Plain text, WikiText's files, and what all readers do with lines.

Documents of plain text are divided by blank lines, each of them one paragraph, hard-wrapped or not. In WikiText
``= Title =`` after a blank line opens a document, and every further line is a paragraph.
"""

import re
from collections.abc import Iterator

from lazyformer_fairseq.corpus.readers.files import Block, Format, Piece, Watch, decode

# Books break "well-known" after its hyphen, never inside "known": the hyphen is the word's own and stays.
HYPHEN_AT_LINE_END = re.compile(r"-(?<=[^\W\d_]-)[^\S\n]*\n\s*(?=[a-zß-öø-ÿ])")
BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
TITLE = re.compile(rb"\s?= [^=\s].* =\s*$")
HEADING = re.compile(r"^ ?= .* =[^\S\n]*$", re.MULTILINE)
JOINT = re.compile(r" @([-,.])@ ")


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


def without_title(text: str, title: str | None) -> str:
    """``text`` without its first line, if that is the title."""
    first, _, rest = text.partition("\n")
    return rest if title is not None and first == " ".join(title.split()) else text


def parse_paragraph(block: Block, piece: Piece, watch: Watch) -> Iterator[tuple[str, dict]]:
    """The lines between blank ones, joined."""
    text = join_hard_wrapped(decode(block.content, watch))
    if text or not block.is_preamble:
        yield text, {}


def parse_article(block: Block, piece: Piece, watch: Watch) -> Iterator[tuple[str, dict]]:
    """The paragraphs below one title of WikiText, without headings.

    Its tokenizer's ``state @-@ run`` and ``1 @,@ 000`` are mended.
    """
    text = HEADING.sub("", decode(block.content, watch))
    text = JOINT.sub(r"\1", lines_to_paragraphs(text))
    if text or not block.is_preamble:
        yield text, {}


WIKITEXT = Format(
    document="an article",
    names=r".*\.tokens",
    recognises=lambda content, file: re.search(rb"(?:\A|\n\s*\n\s?)= [^=\s].* =\s*\n", content) is not None,
    # A list of abbreviations may hold a line `= Games =` too, but not after a blank line.
    starts_document=lambda line, after_blank: after_blank and TITLE.match(line) is not None,
    parse=parse_article,
)
PLAIN_TEXT = Format(
    document="what stands between blank lines (books: say book:PATH)",
    names=r".*\.txt",
    recognises=lambda content, file: True,
    starts_document=lambda line, after_blank: after_blank and not line.isspace(),
    parse=parse_paragraph,
)
