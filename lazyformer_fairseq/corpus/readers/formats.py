"""The formats: how each is recognised, where its documents start, and their text; the documents of a piece of a file.

Documents of plain text are divided by blank lines, each of them one paragraph, hard-wrapped or not. In WikiText
``= Title =`` after a blank line opens a document, and every further line is a paragraph. JSON lines hold an object a
line, whose field ``text`` is the document; newlines in it divide paragraphs. WikiExtractor's ``--json`` is one of
these; it puts the title before the text, which is left out.

Each function of a row takes a block, its piece and a watch, and yields (text, metadata) of the documents in it. In the
place of a broken one it yields, not raises, a BadInputError: what comes after it may be whole.
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
    """Return one paragraph per line, from lines that are paragraphs already, without blank lines and superfluous space.

    Args:
        text: lines that are paragraphs.
        title: left out where it is the first line.
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
    """Return whether MediaWiki wrote this; a UserError for other XML and HTML."""
    if b"<mediawiki" in content[:1000] or content.startswith(b"<page>"):
        return True
    if re.match(rb"<\?xml|<!DOCTYPE|<html", content, re.I):
        raise UserError(f"{file}: is XML or HTML, but no MediaWiki dump; convert it, or leave it out")
    return False


def parse_pages(block: files.Block, piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Yield raw wiki markup of a page with {"title", "namespace", "model", "is_redirect"}; its last revision counts.

    ``<page>``s stand inside ``<mediawiki>`` or, in a part of a dump, without it. A ``<`` in a text is escaped, so that
    each ``<page>`` opens a page, whatever is wrong with the one before it.
    """
    outside = "malformed XML: this stands outside of <page>...</page>"
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
            problem = f"malformed XML{_in_page(xml)}: no whole <page>...</page>; is the file whole?"
            yield files.BadInputError(f"{files.place(piece, line)}: {problem}")
        else:
            yield _parse_page(whole.group(), piece, line)
            if not REST_OF_DUMP.fullmatch(xml, whole.end()):
                lines_before = xml[: -len(xml[whole.end() :].lstrip())].count("\n")
                yield files.BadInputError(f"{files.place(piece, line + lines_before)}: {outside}")
        line += xml.count("\n")


def _parse_page(xml: str, piece: files.Piece, line: int) -> Union[tuple[str, dict], files.BadInputError]:
    try:
        # A <page> alone has no document type, the only place where XML can name other files or entities.
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
    """Return `` in page TITLE``, for a message; nothing where the title cannot be read."""
    title = TITLE_OF_PAGE.search(xml)
    if title:
        return f" in page {unescape(title[1])!r}"
    return ""


TITLE_OF_DOC = re.compile(r'(?>.*?\btitle=")(.*?)"\s*+>')  # atomic: of many openings the first one alone is tried
END_OF_DOC = re.compile(r"^</doc>\s*", re.MULTILINE)


def parse_extracted(block: files.Block, piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Return the paragraphs of ``<doc id=... title="...">``, title, paragraphs, ``</doc>``, without the title."""
    text = files.decode(block.content, watch)
    outside = "text outside of <doc ...> and </doc>"
    if block.is_preamble:
        if text.strip():
            yield files.BadInputError(f"{files.place(piece, block.line)}: {outside}")
        return
    end = END_OF_DOC.search(text)
    if end is None:
        yield files.BadInputError(
            f"{files.place(piece, block.line)}: this <doc ...> is not closed by </doc>; is the file whole?"
        )
        return
    header, _, body = text[: end.start()].partition("\n")
    title = TITLE_OF_DOC.match(header)
    yield (
        lines_to_paragraphs(unescape(body), unescape(title[1]) if title else None),
        {},
    )
    if end.end() != len(text):
        yield files.BadInputError(f"{files.place(piece, block.line + text.count(chr(10), 0, end.end()))}: {outside}")


def is_json_lines(content: bytes, file: str) -> bool:
    """Return whether the first line is an object; a UserError for one list of them."""
    if re.match(rb"\[\s*\{", content) and ".json" in os.path.basename(file):
        raise UserError(f"{file}: is one JSON list; write one object a line (`jq -c '.[]'`)")
    return re.match(rb'\{\s*"', content) is not None


def parse_line(block: files.Block, piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Return the paragraphs of one line's object."""
    if block.is_preamble:  # blank lines
        return
    try:
        record = orjson.loads(files.decode(block.content, watch))
    except orjson.JSONDecodeError as error:
        yield files.BadInputError(f"{files.place(piece, block.line)}: no valid JSON ({error.msg})")
        return
    if not isinstance(record, dict):
        yield files.BadInputError(f"{files.place(piece, block.line)}: a line must be a JSON object, {{...}}")
        return
    text = record.get("text")
    title = record.get("title")
    if not isinstance(text, str):
        fields = ", ".join(sorted(record)) or "none"
        yield files.BadInputError(
            f'{files.place(piece, block.line)}: has no field "text" that is a string; its fields: {fields}'
        )
        return
    yield lines_to_paragraphs(text, title if isinstance(title, str) else None), {}


ROWS_AT_ONCE = 64


def read_table(piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Yield the paragraphs of the column ``text`` of a Parquet file, in the row groups that belong to the piece.

    Row groups are assigned to pieces by their number, not by their offset: pyarrow aborts the process when it is asked
    for the offset of a damaged column.

    Raises:
        BadInputError: the file is damaged, has no such column, or stands for far more bytes than text would; what came
            before it was yielded.
    """
    import pyarrow  # takes a while, which other formats need not spend
    from pyarrow.parquet import ParquetFile

    file = local_copy(piece.path)
    size = os.path.getsize(file)
    try:
        with ParquetFile(file) as table:
            names = table.schema_arrow.names
            texts = (pyarrow.string(), pyarrow.large_string())
            if "text" not in names or table.schema_arrow.field("text").type not in texts:
                raise files.BadInputError(
                    f'{piece.path}: has no column "text" that holds strings; its columns: {", ".join(names)}'
                )
            groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
            unpacked = sum(group.total_byte_size for group in groups)
            if unpacked > max(files.BEYOND_BYTES, files.MOST_TIMES * size):
                raise files.BadInputError(
                    f"{piece.path}: its rows unpack to more than {files.MOST_TIMES} times its size, which no text does"
                )
            row = 1
            for number, group in enumerate(groups):
                begin = number * size // len(groups)
                if piece.start <= begin and (piece.end is None or begin < piece.end):
                    yield from _rows_of(table, number, row, piece.path, watch)
                row += group.num_rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise files.BadInputError(
            f"{piece.path}: cannot be read as Parquet ({str(error).splitlines()[0]}); get it again, or leave it out"
        ) from None


def _rows_of(table: Any, number: int, row: int, path: str, watch: files.Watch) -> files.Parsed:
    """Yield the documents of a row group.

    Args:
        table: the open file.
        number: the row group's, from 0.
        row: the number of its first row in the file, from 1.
        path: of the file, for messages.
        watch: counts what was read with doubt.
    """
    for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[number], columns=["text"]):
        for content in batch.column(0).cast("large_binary").to_pylist():
            if content is None:
                yield files.BadInputError(f"{path}, row {row}: has no text")
            else:
                yield lines_to_paragraphs(files.decode(content, watch)), {}
            row += 1


TITLE_LINE = re.compile(rb"\s?= [^=\s].* =\s*$")
FIRST_TITLE = re.compile(rb"(?:\A|\n[^\S\n]*+\n\s?)= [^=\s].* =[^\S\n]*+\n")
HEADING = re.compile(r"^ ?= .* =[^\S\n]*$", re.MULTILINE)
JOINT = re.compile(r" @([-,.])@ ")


def parse_article(block: files.Block, _piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Return the paragraphs below one title of WikiText, without headings.

    Its tokenizer's ``state @-@ run`` and ``1 @,@ 000`` are mended.
    """
    text = HEADING.sub("", files.decode(block.content, watch))
    text = JOINT.sub(r"\1", lines_to_paragraphs(text))
    if text or not block.is_preamble:
        yield text, {}


def parse_paragraph(block: files.Block, _piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Return the lines between blank ones, joined."""
    text = join_hard_wrapped(files.decode(block.content, watch))
    if text or not block.is_preamble:
        yield text, {}


def parse_lines(block: files.Block, _piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Return the lines between blank ones, each a paragraph of its own."""
    text = lines_to_paragraphs(files.decode(block.content, watch))
    if text or not block.is_preamble:
        yield text, {}


# Books break "well-known" after its hyphen, never inside "known": the hyphen is the word's own and stays.
HYPHEN_AT_LINE_END = re.compile(r"-(?<=[^\W\d_]-)[^\S\n]*\n\s*(?=[a-zß-öø-ÿ])")
BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")


def join_hard_wrapped(text: str) -> str:
    """Return one paragraph from lines that were broken to fit a page."""
    return " ".join(HYPHEN_AT_LINE_END.sub("-", text).split())


# Until about 2004 the header ended with "The Small Print".
GUTENBERG_START = re.compile(r"\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG\b.*|\*END\*? ?THE SMALL PRINT.*")
GUTENBERG_END = re.compile(
    r"^(?:\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG\b|End of (?:the |this )?Project Gutenberg\b)",
    re.MULTILINE,
)
GUTENBERG_CREDITS = re.compile(r"\A(?:(?:Produced|E-?text prepared|Transcribed|Prepared) by .*\n)", re.I)


def read_book(piece: files.Piece, watch: files.Watch) -> files.Parsed:
    """Return the whole file, one paragraph a line, without Gutenberg's notices.

    Raises:
        BadInputError: compressed data is damaged; what came before it was yielded.
    """
    parts = []
    damage = None
    with files.open_decompressed(piece.path) as file:
        try:
            while part := file.read1():
                parts.append(part)
        except files.BadInputError as error:
            damage = error
    text = files.decode(b"".join(parts).removeprefix(files.BOM), watch).replace("\r\n", "\n").replace("\r", "\n")
    text = "\n".join(filter(None, map(join_hard_wrapped, BLANK_LINES.split(text))))
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
    """Return whether Project Gutenberg's header is there."""
    return GUTENBERG_START.search(content.decode(errors="replace")) is not None


# In the order in which a file is tried; all that none of the others recognises is plain text.
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
        # A list of abbreviations may hold a line `= Games =` too, but not after a blank line.
        starts_document=lambda line, after_blank: after_blank and TITLE_LINE.match(line) is not None,
        parse=parse_article,
    ),
    # Plain-text books without Gutenberg's header are known by ``book:PATH`` alone; their names are those of texts.
    "book": files.Format(
        document="a file",
        names="(?!)",
        recognises=is_gutenberg,
        read_whole=read_book,
    ),
    # Transcripts and articles of BabyLM, a sentence or an utterance a line; known by ``babylm:PATH`` alone.
    "babylm": files.Format(
        document="what stands between blank lines, a paragraph a line",
        names="(?!)",
        recognises=lambda _content, _file: False,
        starts_document=lambda line, after_blank: after_blank and not line.isspace(),
        parse=parse_lines,
        is_selected=True,
    ),
    "text": files.Format(
        document="what stands between blank lines (books: say book:PATH)",
        names=r".*\.(?:txt|text|raw|md|markdown|rst|train|valid|validation|dev|test)|enwik[89]|text8",
        recognises=lambda _content, _file: True,
        starts_document=lambda line, after_blank: after_blank and not line.isspace(),
        parse=parse_paragraph,
    ),
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


def read_piece(
    piece: files.Piece,
    watch: Optional[files.Watch] = None,
    skip: Optional[Callable[[files.BadInputError], None]] = None,
) -> Iterator[RawDocument]:
    """Return documents in the order of the file; memory is bounded by the longest one.

    Args:
        piece: of a file.
        watch: counts what was read with doubt.
        skip: receives the remark on a broken record, which is left out; without it the first one is raised.

    Raises:
        BadInputError: names the file, the place and the reason; the documents before it were yielded.
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
            else:
                name = f"@{offset}" + (f"+{in_block}" if in_block else "")
            yield RawDocument(name, *record)


def _parsed(piece: files.Piece, reader: files.Format, watch: files.Watch) -> Iterator[tuple[int, files.Parsed]]:
    """Return the offset of each block, and what is in it; a piece without lines is a block."""
    if reader.read_whole:
        yield piece.start, reader.read_whole(piece, watch)
    else:
        for block in files.read_blocks(piece, reader.starts_document):
            yield block.offset, reader.parse(block, piece, watch)
