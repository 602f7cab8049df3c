"""Input formats: how to recognize each, find its documents, and extract their text.

Plain-text documents are separated by blank lines; each is one paragraph, hard-wrapped or not. In WikiText,
``= Title =`` after a blank line starts a document, and all remaining lines are paragraphs. JSON lines have one object
per line; the object's field ``text`` contains the document, in which newlines separate paragraphs. WikiExtractor's
``--json`` output has this form, but repeats the title at the start of the text; this copy of the title is removed.

A format's parse function takes a block, its piece and a watch, and yields (text, metadata) for each document in the
block. For a broken document it yields a BadInputError rather than raising it, because the next document may be intact.
"""

import os
import re
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any, NamedTuple, Optional, Union
from xml.etree import ElementTree

import orjson

from lazyformer_fairseq.corpus.readers import files
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.remote import local_copy


def lines_to_paragraphs(text: str, title: Optional[str] = None) -> str:
    """Remove blank lines and extra spaces from text with one paragraph per line.

    Args:
        text: the text.
        title: the title, which is removed if it is the first line.
    """
    lines = (" ".join(line.split()) for line in text.split("\n"))
    text = "\n".join(line for line in lines if line)
    first, _, rest = text.partition("\n")
    if title is not None and first == " ".join(title.split()):
        return rest
    return text


PAGE = re.compile(r"<page>.*?</page\s*>", re.DOTALL)
REST_OF_DUMP = re.compile(r"\s*(?:</mediawiki\s*>\s*)?")
TITLE_OF_PAGE = re.compile(r"<title>([^<\n]{1,200})</title>")


def is_dump(content: bytes, file: str) -> bool:
    """Return whether a file is a MediaWiki dump.

    Raises:
        UserError: the file is HTML or other XML.
    """
    if b"<mediawiki" in content[:1000] or content.startswith(b"<page>"):
        return True
    if re.match(rb"<\?xml|<!DOCTYPE|<html", content, re.I):
        raise UserError(f"{file} is XML or HTML, but not a MediaWiki dump; convert it to text, or exclude it")
    return False


def parse_pages(block: files.Block, piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Yield the raw wiki markup of each page's last revision, and the page's title, namespace, model and is_redirect.

    ``<page>`` elements are inside ``<mediawiki>`` or, in a part of a dump, on their own. A ``<`` in text is escaped, so
    every ``<page>`` starts a page, even if the previous page is malformed.
    """
    outside = "malformed XML: this is outside of <page>...</page>"
    if block.is_preamble:  # <mediawiki> and <siteinfo>
        if b"</page>" in block.content:
            yield files.BadInputError(f"{files.place(piece, block.line)}: {outside}")
        return
    before, *pages = files.decode(block.content, watch).split("<page>")
    line = block.line + before.count("\n")
    for rest in pages:
        xml = f"<page>{rest}"
        whole = PAGE.match(xml)
        if whole is None:
            problem = f"malformed XML{_in_page(xml)}: this <page> is not closed by </page>; is the file complete?"
            yield files.BadInputError(f"{files.place(piece, line)}: {problem}")
        else:
            yield _parse_page(whole.group(), piece, line)
            if not REST_OF_DUMP.fullmatch(xml, whole.end()):
                text_outside = xml[whole.end() :].lstrip()
                lines_before = xml[: -len(text_outside)].count("\n")
                yield files.BadInputError(f"{files.place(piece, line + lines_before)}: {outside}")
        line += xml.count("\n")


def _parse_page(xml: str, piece: files.Piece, line: int) -> Union[tuple[str, dict], files.BadInputError]:
    try:
        # A standalone <page> has no document type declaration, which is the only place where XML can reference other
        # files or define entities.
        page = ElementTree.fromstring(xml)  # noqa: S314
    except ElementTree.ParseError as error:
        where = files.place(piece, line + error.position[0] - 1)
        return files.BadInputError(f"{where}: malformed XML{_in_page(xml)} ({str(error).partition(':')[0]})")
    last = (page.findall("revision") or [page])[-1]
    return last.findtext("text") or "", {
        "title": page.findtext("title") or "",
        "namespace": page.findtext("ns") or "0",
        "model": last.findtext("model") or "wikitext",
        "is_redirect": page.find("redirect") is not None,
    }


def _in_page(xml: str) -> str:
    """Return `` in page TITLE`` for a message, or an empty string if the title cannot be read."""
    title = TITLE_OF_PAGE.search(xml)
    if title:
        return f" in page {unescape(title[1])!r}"
    return ""


TITLE_OF_DOC = re.compile(r'(?>.*?\btitle=")(.*?)"\s*+>')  # atomic: only the first of many openings is tried
END_OF_DOC = re.compile(r"^</doc>\s*", re.MULTILINE)


def parse_extracted(block: files.Block, piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Yield the paragraphs between ``<doc id=... title="...">`` and ``</doc>``, without the title above them."""
    text = files.decode(block.content, watch)
    outside = "this is outside of <doc ...>...</doc>"
    if block.is_preamble:
        if text.strip():
            yield files.BadInputError(f"{files.place(piece, block.line)}: {outside}")
        return
    end = END_OF_DOC.search(text)
    if end is None:
        yield files.BadInputError(
            f"{files.place(piece, block.line)}: this <doc ...> is not closed by </doc>; is the file complete?"
        )
        return
    header, _, body = text[: end.start()].partition("\n")
    found = TITLE_OF_DOC.match(header)
    title = None
    if found:
        title = unescape(found[1])
    yield lines_to_paragraphs(unescape(body), title), {}
    if end.end() != len(text):
        line = block.line + text.count("\n", 0, end.end())
        yield files.BadInputError(f"{files.place(piece, line)}: {outside}")


def is_json_lines(content: bytes, file: str) -> bool:
    """Return whether the first line is a JSON object.

    Raises:
        UserError: the file is a single JSON list of objects.
    """
    if re.match(rb"\[\s*\{", content) and ".json" in os.path.basename(file):
        raise UserError(f"{file} is a single JSON list; write one object per line (`jq -c '.[]'` does this)")
    return re.match(rb'\{\s*"', content) is not None


def parse_line(block: files.Block, piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Yield the paragraphs in a line's JSON object."""
    if block.is_preamble:  # blank lines
        return
    try:
        record = orjson.loads(files.decode(block.content, watch))
    except orjson.JSONDecodeError as error:
        yield files.BadInputError(f"{files.place(piece, block.line)}: not valid JSON ({error.msg})")
        return
    if not isinstance(record, dict):
        yield files.BadInputError(f"{files.place(piece, block.line)}: a line must be a JSON object, {{...}}")
        return
    text = record.get("text")
    title = record.get("title")
    if not isinstance(text, str):
        fields = ", ".join(sorted(record)) or "none"
        yield files.BadInputError(f'{files.place(piece, block.line)}: no string field "text"; fields found: {fields}')
        return
    if not isinstance(title, str):
        title = None
    yield lines_to_paragraphs(text, title), {}


ROWS_AT_ONCE = 64


def read_table(piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Yield the documents in the column ``text`` of a Parquet file, from the row groups that belong to the piece.

    Row groups are assigned to pieces by number, not by offset, because pyarrow aborts the process when asked for the
    offset of a damaged column.

    Raises:
        BadInputError: the file is damaged, has no such column, or expands to far more bytes than text would. The
            documents before the damage have been yielded.
    """
    import pyarrow  # slow to import, and not needed by other formats
    from pyarrow.parquet import ParquetFile

    file = local_copy(piece.path)
    size = os.path.getsize(file)
    try:
        with ParquetFile(file) as table:
            names = table.schema_arrow.names
            texts = (pyarrow.string(), pyarrow.large_string())
            if "text" not in names or table.schema_arrow.field("text").type not in texts:
                raise files.BadInputError(f'{piece.path}: no string column "text"; columns found: {", ".join(names)}')
            groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
            unpacked = sum(group.total_byte_size for group in groups)
            if unpacked > max(files.BEYOND_BYTES, files.MOST_TIMES * size):
                raise files.BadInputError(
                    f"{piece.path}: the rows expand to more than {files.MOST_TIMES} times the size of the file, which "
                    "text never does"
                )
            row = 1
            for number, group in enumerate(groups):
                begin = number * size // len(groups)
                if piece.start <= begin and (piece.end is None or begin < piece.end):
                    yield from _rows_of(table, number, row, piece.path, watch)
                row += group.num_rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise files.BadInputError(
            f"{piece.path}: cannot be read as Parquet ({str(error).splitlines()[0]}); get a new copy, or exclude the "
            "file"
        ) from None


def _rows_of(table: Any, number: int, row: int, path: str, watch: files.Watch) -> files.Parsed:
    """Yield the documents in a row group, and a BadInputError for each row without text.

    Args:
        table: the open file.
        number: number of the row group, from 0.
        row: number of the group's first row in the file, from 1.
        path: path of the file, for messages.
        watch: counts lines that are not UTF-8.
    """
    for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[number], columns=["text"]):
        for content in batch.column(0).cast("large_binary").to_pylist():
            if content is None:
                yield files.BadInputError(f"{path}, row {row}: no text")
            else:
                yield lines_to_paragraphs(files.decode(content, watch)), {}
            row += 1


TITLE_LINE = re.compile(rb"\s?= [^=\s].* =\s*$")
FIRST_TITLE = re.compile(rb"(?:\A|\n[^\S\n]*+\n\s?)= [^=\s].* =[^\S\n]*+\n")
HEADING = re.compile(r"^ ?= .* =[^\S\n]*$", re.MULTILINE)
JOINT = re.compile(r" @([-,.])@ ")


def parse_article(block: files.Block, _piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Yield the paragraphs below a WikiText title, without headings.

    WikiText writes ``state @-@ run`` for "state-run" and ``1 @,@ 000`` for "1,000"; the original text is restored.
    """
    text = HEADING.sub("", files.decode(block.content, watch))
    text = JOINT.sub(r"\1", lines_to_paragraphs(text))
    if text or not block.is_preamble:
        yield text, {}


def parse_paragraph(block: files.Block, _piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Yield the lines between blank lines, joined into a single paragraph."""
    text = join_hard_wrapped(files.decode(block.content, watch))
    if text or not block.is_preamble:
        yield text, {}


def parse_lines(block: files.Block, _piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Yield the lines between blank lines, each as a paragraph."""
    text = lines_to_paragraphs(files.decode(block.content, watch))
    if text or not block.is_preamble:
        yield text, {}


# Books break lines after the hyphen of "well-known" but never inside "known", so a hyphen at the end of a line belongs
# to the word.
HYPHEN_AT_LINE_END = re.compile(r"-(?<=[^\W\d_]-)[^\S\n]*\n\s*(?=[a-zß-öø-ÿ])")
BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")


def join_hard_wrapped(text: str) -> str:
    """Join hard-wrapped lines into a single paragraph."""
    return " ".join(HYPHEN_AT_LINE_END.sub("-", text).split())


# Until about 2004 the header ended with "The Small Print".
GUTENBERG_START = re.compile(r"\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG\b.*|\*END\*? ?THE SMALL PRINT.*")
GUTENBERG_END = re.compile(
    r"^(?:\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG\b|End of (?:the |this )?Project Gutenberg\b)",
    re.MULTILINE,
)
GUTENBERG_CREDITS = re.compile(r"\A(?:(?:Produced|E-?text prepared|Transcribed|Prepared) by .*\n)", re.I)


def read_book(piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Yield the whole file as one document, with one paragraph per line and without Project Gutenberg's notices.

    Raises:
        BadInputError: the compressed data is damaged. The text before the damage has been yielded.
    """
    parts = []
    damage = None
    with files.open_decompressed(piece.path) as file:
        try:
            while part := file.read1():
                parts.append(part)
        except files.BadInputError as error:
            damage = error
    text = files.decode(b"".join(parts).removeprefix(files.BOM), watch)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    paragraphs = map(join_hard_wrapped, BLANK_LINES.split(text))
    text = "\n".join(filter(None, paragraphs))

    end = GUTENBERG_END.search(text)
    if end:
        text = text[: end.start()]
    start = GUTENBERG_START.search(text)
    if start:
        text = text[start.end() :].lstrip("\n")
    text = GUTENBERG_CREDITS.sub("", text).rstrip("\n")

    if text or not damage:
        yield text, {}
    if damage:
        raise damage


def is_gutenberg(content: bytes, _file: str) -> bool:
    """Return whether a file begins with Project Gutenberg's header."""
    return GUTENBERG_START.search(content.decode(errors="replace")) is not None


# Formats are tried in this order; a file that no other format recognizes is plain text.
FORMATS: dict[str, files.Format] = {
    "parquet": files.Format(
        document="a row",
        names=r".*\.parquet",
        recognises=lambda _content, _file: False,
        read_whole=read_table,
        magic=b"PAR1",
    ),
    "wikiextractor": files.Format(
        document="a <doc>",
        names=r"wiki_\d+",
        recognises=lambda content, _file: content.startswith(b"<doc "),
        starts_document=lambda line, _after_blank: line.startswith(b"<doc "),
        parse=parse_extracted,
    ),
    "mediawiki": files.Format(
        document="a page",
        names=r".*\.xml(?:-p\d+p\d+.*?)?",
        recognises=is_dump,
        starts_document=lambda line, _after_blank: b"<page>" in line,
        parse=parse_pages,
    ),
    "jsonl": files.Format(
        document="a line",
        names=r".*\.(?:jsonl?|ndjson)",
        recognises=is_json_lines,
        starts_document=lambda line, _after_blank: not line.isspace(),
        parse=parse_line,
    ),
    "wikitext": files.Format(
        document="an article",
        names=r".*\.tokens",
        recognises=lambda content, _file: FIRST_TITLE.search(content) is not None,
        # A list of abbreviations may also contain a line such as `= Games =`, but not after a blank line.
        starts_document=lambda line, after_blank: after_blank and TITLE_LINE.match(line) is not None,
        parse=parse_article,
    ),
    # Plain-text books without Project Gutenberg's header need ``book:PATH``, because their names do not identify them.
    "book": files.Format(
        document="a file",
        names="(?!)",
        recognises=is_gutenberg,
        read_whole=read_book,
    ),
    # BabyLM's transcripts and articles, with one sentence or utterance per line, need ``babylm:PATH``.
    "babylm": files.Format(
        document="the text between blank lines, one paragraph per line",
        names="(?!)",
        recognises=lambda _content, _file: False,
        starts_document=lambda line, after_blank: after_blank and not line.isspace(),
        parse=parse_lines,
        is_selected=True,
    ),
    "text": files.Format(
        document="the text between blank lines (for books, use book:PATH)",
        names=r".*\.(?:txt|text|raw|md|markdown|rst|train|valid|validation|dev|test)|enwik[89]|text8",
        recognises=lambda _content, _file: True,
        starts_document=lambda line, after_blank: after_blank and not line.isspace(),
        parse=parse_paragraph,
    ),
}


class RawDocument(NamedTuple):
    """A document as read from its file.

    Attributes:
        number: the document's number in its file, from 1. In a piece of a file, where the number of earlier documents
            is unknown, it is ``@OFFSET``, the offset of the document's first byte; in a piece of a bz2 file, it is
            ``@START+NUMBER``, where START is the offset of the piece and NUMBER counts the documents in the piece.
        text: one paragraph per line; for ``mediawiki``, raw wiki markup.
        metadata: for ``mediawiki``, the page's title, namespace, model and is_redirect; otherwise empty.
    """

    number: Union[int, str]
    text: str
    metadata: dict[str, Any]


def read_piece(
    piece: files.Piece,
    watch: Optional[files.Watch] = None,
    skip: Optional[Callable[[files.BadInputError], None]] = None,
) -> Iterator[RawDocument]:
    """Yield the documents of a piece in file order; memory is bounded by the longest document.

    Args:
        piece: the piece to read.
        watch: counts lines that are not UTF-8.
        skip: called with the error for each broken record, which is then skipped; if None, the first error is raised.

    Raises:
        BadInputError: a record is broken or the file is damaged; the message names the file, the location and the
            reason. The documents before it have been yielded.
    """
    if watch is None:
        watch = files.Watch()
    reader = FORMATS[piece.format]
    is_compressed = files.compression(piece.path) is not None
    number = 0
    for offset, parsed in _parsed(piece, reader, watch):
        for in_block, record in enumerate(parsed):
            if isinstance(record, files.BadInputError):
                if skip is None:
                    raise record
                skip(record)
                continue
            number += 1
            if not piece.start and piece.end is None:
                name: Union[int, str] = number
            elif is_compressed:
                name = f"@{piece.start}+{number}"
            elif in_block:
                name = f"@{offset}+{in_block}"
            else:
                name = f"@{offset}"
            yield RawDocument(name, *record)


def _parsed(piece: files.Piece, reader: files.Format, watch: files.Watch) -> Iterator[tuple[int, files.Parsed]]:
    """Yield each block's offset and its documents; a piece that is read whole is a single block."""
    if reader.read_whole:
        yield piece.start, reader.read_whole(piece, watch)
    else:
        for block in files.read_blocks(piece, reader.starts_document):
            yield block.offset, reader.parse(block, piece, watch)
