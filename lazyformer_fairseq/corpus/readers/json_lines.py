"""JSONL: an object a line, its field ``text`` is the document, newlines in it divide paragraphs.

WikiExtractor's ``--json`` is one of these; it puts the title before the text, which is left out.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import orjson

from lazyformer_fairseq.corpus.readers.files import BadInput, Block, Format, Piece, Watch, decode, place
from lazyformer_fairseq.corpus.readers.plain_text import lines_to_paragraphs, without_title
from lazyformer_fairseq.errors import UserError


def is_json_lines(content: bytes, file: Path) -> bool:
    """Whether the first line is an object; a UserError for one list of them."""
    if re.match(rb"\[\s*\{", content) and ".json" in file.name:
        raise UserError(f"{file}: is one JSON list; write one object a line (`jq -c '.[]'`)")
    return re.match(rb'\{\s*"', content) is not None


def parse_line(block: Block, piece: Piece, watch: Watch) -> Iterator[tuple[str, dict]]:
    """The paragraphs of one line's object. BadInput names a line that is not such an object."""
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


JSON_LINES = Format(
    document="a line",
    names=r".*\.jsonl?",
    recognises=is_json_lines,
    starts_document=lambda line, after_blank: not line.isspace(),
    parse=parse_line,
    extension="jsonl",
)
