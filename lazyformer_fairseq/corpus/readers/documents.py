"""The table of formats, and the documents of a file, or of a piece of one, in any of them."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Optional, Union

from lazyformer_fairseq.corpus.readers.book import BOOK
from lazyformer_fairseq.corpus.readers.files import Format, Piece, Watch, compression, read_blocks
from lazyformer_fairseq.corpus.readers.json_lines import JSON_LINES
from lazyformer_fairseq.corpus.readers.plain_text import PLAIN_TEXT, WIKITEXT
from lazyformer_fairseq.corpus.readers.wikipedia import MEDIAWIKI, WIKIEXTRACTOR

# In the order in which a file is tried; all that none of the others recognises is plain text.
FORMATS: dict[str, Format] = {
    "wikiextractor": WIKIEXTRACTOR,
    "mediawiki": MEDIAWIKI,
    "jsonl": JSON_LINES,
    "wikitext": WIKITEXT,
    "book": BOOK,
    "text": PLAIN_TEXT,
}


class RawDocument(NamedTuple):
    """A document as its file has it.

    Attributes:
        number: of the document in its file, from 1. In a piece of a file, where the number of earlier ones is unknown:
            ``@OFFSET`` of its first byte; in a piece of a bz2 file ``@START+NUMBER``, the number within the piece.
        text: one paragraph a line; of ``mediawiki`` raw wiki markup.
        metadata: of ``mediawiki`` the page's title, namespace, model and is_redirect; else empty.
    """

    number: Union[int, str]
    text: str
    metadata: dict[str, Any]


def read_piece(piece: Piece, watch: Optional[Watch] = None) -> Iterator[RawDocument]:
    """Documents in the order of the file; memory is bounded by the longest one.

    Raises:
        BadInput: names the file, the place and the reason; the documents before it were yielded.
    """
    watch = Watch() if watch is None else watch
    reader = FORMATS[piece.format]
    if reader.read_whole:
        yield RawDocument(1, reader.read_whole(piece.path, watch), {})
        return
    is_compressed = compression(piece.path) is not None
    number = 0
    for block in read_blocks(piece, reader.starts_document, watch):
        for in_block, (text, metadata) in enumerate(reader.parse(block, piece, watch)):
            number += 1
            if not piece.start and piece.end is None:
                name: Union[int, str] = number
            elif is_compressed:
                name = f"@{piece.start}+{number}"
            else:
                name = f"@{block.offset}" + (f"+{in_block}" if in_block else "")
            yield RawDocument(name, text, metadata)
