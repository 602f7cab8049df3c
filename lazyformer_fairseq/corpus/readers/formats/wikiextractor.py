"""WikiExtractor's own output: ``<doc id=... title="...">``, the title as a line, paragraphs, ``</doc>``."""

import re
from collections.abc import Iterator
from html import unescape

from lazyformer_fairseq.corpus.readers.blocks import Block, Piece, Watch, decode, place
from lazyformer_fairseq.corpus.readers.compressed import BadInput
from lazyformer_fairseq.corpus.readers.formats.plain_text import lines_to_paragraphs

TITLE = re.compile(r'\btitle="(.*?)"\s*>')
END = re.compile(r"^</doc>\s*", re.MULTILINE)


def starts_document(line: bytes, after_blank: bool) -> bool:
    return line.startswith(b"<doc ")


def parse(block: Block, piece: Piece, watch: Watch) -> Iterator[tuple[str, dict]]:
    """The document of one ``<doc>``, without its title. BadInput names the line of an element that is broken."""
    text = decode(block.content, watch)
    if block.is_preamble:
        if text.strip():
            raise BadInput(f"{place(piece, block.line)}: text outside of <doc ...> and </doc>")
        return
    end = END.search(text)
    if end is None:
        raise BadInput(f"{place(piece, block.line)}: this <doc ...> is not closed by </doc>; is the file whole?")
    if end.end() != len(text):
        line = block.line + text.count("\n", 0, end.end())
        raise BadInput(f"{place(piece, line)}: text outside of <doc ...> and </doc>")
    header, _, body = text[: end.start()].partition("\n")
    title = TITLE.search(header)
    yield without_title(lines_to_paragraphs(unescape(body)), unescape(title.group(1)) if title else None), {}


def without_title(text: str, title: str | None) -> str:
    """``text`` without its first line, if that is the title."""
    first, _, rest = text.partition("\n")
    return rest if title is not None and first == " ".join(title.split()) else text
