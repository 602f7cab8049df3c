"""JSONL: an object a line, its field ``text`` is the document, newlines in it divide paragraphs.

WikiExtractor's ``--json`` is one of these; it puts the title before the text, which is left out.
"""

from collections.abc import Iterator

import orjson

from lazyformer_fairseq.corpus.readers.blocks import Block, Piece, Watch, decode, place
from lazyformer_fairseq.corpus.readers.compressed import BadInput
from lazyformer_fairseq.corpus.readers.formats.plain_text import lines_to_paragraphs
from lazyformer_fairseq.corpus.readers.formats.wikiextractor import without_title


def starts_document(line: bytes, after_blank: bool) -> bool:
    return not line.isspace()


def parse(block: Block, piece: Piece, watch: Watch) -> Iterator[tuple[str, dict]]:
    """The document of one line: its paragraphs and metadata. BadInput names a line that is not such an object."""
    if block.is_preamble:  # blank lines
        return
    try:
        record = orjson.loads(decode(block.content, watch))
    except orjson.JSONDecodeError as error:
        raise BadInput(f"{place(piece, block.line)}: no valid JSON ({error.msg})") from None
    if not isinstance(record, dict):
        raise BadInput(f"{place(piece, block.line)}: a line must be a JSON object, {{...}}")
    text = record.get("text")
    if not isinstance(text, str):
        fields = ", ".join(sorted(record)) or "none"
        raise BadInput(f'{place(piece, block.line)}: has no field "text" that is a string; its fields: {fields}')
    title = record.get("title")
    yield without_title(lines_to_paragraphs(text), title if isinstance(title, str) else None), {}
