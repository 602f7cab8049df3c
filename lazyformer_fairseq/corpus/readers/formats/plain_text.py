"""Plain text: documents divided by blank lines, each of them one paragraph, hard-wrapped or not."""

from collections.abc import Iterator

from lazyformer_fairseq.corpus.readers.blocks import Block, Piece, Watch, decode
from lazyformer_fairseq.corpus.readers.formats.paragraphs import join_hard_wrapped


def starts_document(line: bytes, after_blank: bool) -> bool:
    return after_blank and not line.isspace()


def parse(block: Block, piece: Piece, watch: Watch) -> Iterator[tuple[str, dict]]:
    text = join_hard_wrapped(decode(block.content, watch))
    if text or not block.is_preamble:
        yield text, {}
