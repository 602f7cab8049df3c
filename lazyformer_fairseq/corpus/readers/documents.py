"""Documents of a file, or of a piece of one, in any format: :func:`read_piece` finds the right reader."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Optional, Union

from lazyformer_fairseq.corpus.readers.blocks import Piece, Watch, read_blocks
from lazyformer_fairseq.corpus.readers.compressed import compression
from lazyformer_fairseq.corpus.readers.formats import json_lines, mediawiki, plain_text, wikiextractor, wikitext
from lazyformer_fairseq.corpus.readers.formats.book import read_book

# Each has starts_document(line, after_blank), and parse(block, piece, watch) that yields (text, metadata).
READERS = {
    "mediawiki": mediawiki,
    "wikiextractor": wikiextractor,
    "jsonl": json_lines,
    "text": plain_text,
    "wikitext": wikitext,
}
FORMATS = (*READERS, "book")


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
    if piece.format == "book":
        yield RawDocument(1, read_book(piece.path, watch), {})
        return
    reader = READERS[piece.format]
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
