"""WikiText's files: ``= Title =`` after a blank line opens a document, every further line is a paragraph.

Headings (``= = Section = =``) are left out; its tokenizer's ``state @-@ run`` and ``1 @,@ 000`` are mended.
"""

import re
from collections.abc import Iterator

from lazyformer_fairseq.corpus.readers.blocks import Block, Piece, Watch, decode
from lazyformer_fairseq.corpus.readers.formats.plain_text import lines_to_paragraphs

TITLE = re.compile(rb"\s?= [^=\s].* =\s*$")
HEADING = re.compile(r"^ ?= .* =[^\S\n]*$", re.MULTILINE)
JOINT = re.compile(r" @([-,.])@ ")


def starts_document(line: bytes, after_blank: bool) -> bool:
    # A list of abbreviations may hold a line `= Games =` too, but not after a blank line.
    return after_blank and TITLE.match(line) is not None


def parse(block: Block, piece: Piece, watch: Watch) -> Iterator[tuple[str, dict]]:
    """The article below one title: its paragraphs, without headings."""
    text = HEADING.sub("", decode(block.content, watch))
    text = JOINT.sub(r"\1", lines_to_paragraphs(text))
    if text or not block.is_preamble:
        yield text, {}
