"""Books, ``.txt`` or ``.epub``: the whole file is one document; Project Gutenberg's header and licence are cut off."""

import re

from lazyformer_fairseq.corpus.readers.blocks import BOM, Watch, decode
from lazyformer_fairseq.corpus.readers.compressed import open_decompressed
from lazyformer_fairseq.corpus.readers.formats.epub import is_epub, read_epub
from lazyformer_fairseq.corpus.readers.formats.plain_text import blocks_to_paragraphs

# Until about 2004 the header ended with "The Small Print".
GUTENBERG_START = re.compile(r"\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG\b.*|\*END\*? ?THE SMALL PRINT.*")
GUTENBERG_END = re.compile(
    r"^(?:\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG\b|End of (?:the |this )?Project Gutenberg\b)", re.MULTILINE
)
GUTENBERG_CREDITS = re.compile(r"\A(?:(?:Produced|E-?text prepared|Transcribed|Prepared) by .*\n)", re.I)


def read_book(path: str, watch: Watch) -> str:
    """One paragraph a line.

    Raises:
        BadInput: an epub that is not one, or has no text; damaged compressed data.
    """
    with open_decompressed(path) as file:
        content = file.read()
        watch.bytes_done = file.raw.consumed
    text = read_epub(path, content) if is_epub(content) else decode(content.removeprefix(BOM), watch)
    return without_gutenberg_notices(blocks_to_paragraphs(text))


def without_gutenberg_notices(text: str) -> str:
    """The book itself, from a text with one paragraph a line."""
    end = GUTENBERG_END.search(text)
    text = text[: end.start()] if end else text
    start = GUTENBERG_START.search(text)
    text = text[start.end() :].lstrip("\n") if start else text
    return GUTENBERG_CREDITS.sub("", text).rstrip("\n")
