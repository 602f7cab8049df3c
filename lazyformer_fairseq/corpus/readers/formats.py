"""The formats: how each is recognised, where its documents start, and their text; the documents of a piece of a file.

Documents of plain text are divided by blank lines, each of them one paragraph, hard-wrapped or not. In WikiText
``= Title =`` after a blank line opens a document, and every further line is a paragraph. JSON lines hold an object a
line, whose field ``text`` is the document; newlines in it divide paragraphs. WikiExtractor's ``--json`` is one of
these; it puts the title before the text, which is left out.

Each function of a row takes a block, its piece and a watch, and yields (text, metadata) of the documents in it.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import orjson

from lazyformer_fairseq.corpus.readers import files
from lazyformer_fairseq.errors import UserError

Parsed = Iterator[tuple[str, dict[str, Any]]]


def lines_to_paragraphs(text: str, title: Optional[str] = None) -> str:
    """One paragraph a line, from lines that are paragraphs already: drops blank lines and superfluous space.

    Args:
        title: left out where it is the first line.
    """
    lines = (" ".join(line.split()) for line in text.split("\n"))
    text = "\n".join(line for line in lines if line)
    first, _, rest = text.partition("\n")
    return rest if title is not None and first == " ".join(title.split()) else text


PAGE = re.compile(r"<page\b.*?</page\s*>", re.DOTALL)  # inside of text `<` is escaped
REST_OF_DUMP = re.compile(r"\s*(?:</mediawiki\s*>\s*)?")


def is_dump(content: bytes, file: Path) -> bool:
    """Whether MediaWiki wrote this; a UserError for other XML and HTML."""
    if b"<mediawiki" in content[:1000] or content.startswith(b"<page>"):
        return True
    if re.match(rb"<\?xml|<!DOCTYPE|<html", content, re.I):
        raise UserError(f"{file}: is XML or HTML, but no MediaWiki dump; convert it, or leave it out")
    return False


def parse_pages(block: files.Block, piece: files.Piece, watch: files.Watch) -> Parsed:
    """Raw wiki markup of a page with {"title", "namespace", "model", "is_redirect"}; its last revision counts.

    ``<page>``s stand inside ``<mediawiki>`` or, in a part of a dump, without it.
    """
    if block.is_preamble:  # <mediawiki> and <siteinfo>
        return
    text = files.decode(block.content, watch)
    end = text.index("<page>")
    for match in PAGE.finditer(text):
        if text[end : match.start()].strip():
            break
        end = match.end()
        yield _parse_page(match.group(), piece, block.line + text.count("\n", 0, match.start()))
    if not REST_OF_DUMP.fullmatch(text, end):
        where = files.place(piece, block.line + text.count("\n", 0, end))
        raise files.BadInput(f"{where}: malformed XML: no whole <page>...</page>; is the file whole?")


def _parse_page(xml: str, piece: files.Piece, line: int) -> tuple[str, dict]:
    try:
        # A <page> alone has no document type, the only place where XML can name other files or entities.
        page = ElementTree.fromstring(xml)  # noqa: S314
    except ElementTree.ParseError as error:
        where = files.place(piece, line + error.position[0] - 1)
        raise files.BadInput(f"{where}: malformed XML ({str(error).partition(':')[0]})") from None
    last = (page.findall("revision") or [page])[-1]
    return last.findtext("text") or "", {
        "title": page.findtext("title") or "",
        "namespace": page.findtext("ns") or "0",
        "model": last.findtext("model") or "wikitext",
        "is_redirect": page.find("redirect") is not None,
    }


TITLE_OF_DOC = re.compile(r'\btitle="(.*?)"\s*>')
END_OF_DOC = re.compile(r"^</doc>\s*", re.MULTILINE)


def parse_extracted(block: files.Block, piece: files.Piece, watch: files.Watch) -> Parsed:
    """The paragraphs of ``<doc id=... title="...">``, title, paragraphs, ``</doc>``, without the title.

    BadInput names the line of an element that is broken.
    """
    text = files.decode(block.content, watch)
    outside = "text outside of <doc ...> and </doc>"
    if block.is_preamble:
        if text.strip():
            raise files.BadInput(f"{files.place(piece, block.line)}: {outside}")
        return
    end = END_OF_DOC.search(text)
    if end is None:
        raise files.BadInput(
            f"{files.place(piece, block.line)}: this <doc ...> is not closed by </doc>; is the file whole?"
        )
    if end.end() != len(text):
        raise files.BadInput(f"{files.place(piece, block.line + text.count(chr(10), 0, end.end()))}: {outside}")
    header, _, body = text[: end.start()].partition("\n")
    title = TITLE_OF_DOC.search(header)
    yield lines_to_paragraphs(unescape(body), unescape(title[1]) if title else None), {}


def is_json_lines(content: bytes, file: Path) -> bool:
    """Whether the first line is an object; a UserError for one list of them."""
    if re.match(rb"\[\s*\{", content) and ".json" in file.name:
        raise UserError(f"{file}: is one JSON list; write one object a line (`jq -c '.[]'`)")
    return re.match(rb'\{\s*"', content) is not None


def parse_line(block: files.Block, piece: files.Piece, watch: files.Watch) -> Parsed:
    """The paragraphs of one line's object. BadInput names a line that is not such an object."""
    if block.is_preamble:  # blank lines
        return
    try:
        record = orjson.loads(files.decode(block.content, watch))
    except orjson.JSONDecodeError as error:
        raise files.BadInput(f"{files.place(piece, block.line)}: no valid JSON ({error.msg})") from None
    if not isinstance(record, dict):
        raise files.BadInput(f"{files.place(piece, block.line)}: a line must be a JSON object, {{...}}")
    text, title = record.get("text"), record.get("title")
    if not isinstance(text, str):
        fields = ", ".join(sorted(record)) or "none"
        raise files.BadInput(
            f'{files.place(piece, block.line)}: has no field "text" that is a string; its fields: {fields}'
        )
    yield lines_to_paragraphs(text, title if isinstance(title, str) else None), {}


TITLE_LINE = re.compile(rb"\s?= [^=\s].* =\s*$")
HEADING = re.compile(r"^ ?= .* =[^\S\n]*$", re.MULTILINE)
JOINT = re.compile(r" @([-,.])@ ")


def parse_article(block: files.Block, piece: files.Piece, watch: files.Watch) -> Parsed:
    """The paragraphs below one title of WikiText, without headings.

    Its tokenizer's ``state @-@ run`` and ``1 @,@ 000`` are mended.
    """
    text = HEADING.sub("", files.decode(block.content, watch))
    text = JOINT.sub(r"\1", lines_to_paragraphs(text))
    if text or not block.is_preamble:
        yield text, {}


def parse_paragraph(block: files.Block, piece: files.Piece, watch: files.Watch) -> Parsed:
    """The lines between blank ones, joined."""
    text = join_hard_wrapped(files.decode(block.content, watch))
    if text or not block.is_preamble:
        yield text, {}


# Books break "well-known" after its hyphen, never inside "known": the hyphen is the word's own and stays.
HYPHEN_AT_LINE_END = re.compile(r"-(?<=[^\W\d_]-)[^\S\n]*\n\s*(?=[a-zß-öø-ÿ])")
BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")


def join_hard_wrapped(text: str) -> str:
    """One paragraph from lines that were broken to fit a page."""
    return " ".join(HYPHEN_AT_LINE_END.sub("-", text).split())


# Until about 2004 the header ended with "The Small Print".
GUTENBERG_START = re.compile(r"\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG\b.*|\*END\*? ?THE SMALL PRINT.*")
GUTENBERG_END = re.compile(
    r"^(?:\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG\b|End of (?:the |this )?Project Gutenberg\b)", re.MULTILINE
)
GUTENBERG_CREDITS = re.compile(r"\A(?:(?:Produced|E-?text prepared|Transcribed|Prepared) by .*\n)", re.I)


def read_book(path: str, watch: files.Watch) -> str:
    """The whole file, one paragraph a line, without Gutenberg's notices. BadInput for damaged compressed data."""
    with files.open_decompressed(path) as file:
        text = files.decode(file.read().removeprefix(files.BOM), watch).replace("\r\n", "\n").replace("\r", "\n")
    text = "\n".join(filter(None, map(join_hard_wrapped, BLANK_LINES.split(text))))
    end = GUTENBERG_END.search(text)
    text = text[: end.start()] if end else text
    start = GUTENBERG_START.search(text)
    text = text[start.end() :].lstrip("\n") if start else text
    return GUTENBERG_CREDITS.sub("", text).rstrip("\n")


def is_gutenberg(content: bytes, file: Path) -> bool:
    """Whether Project Gutenberg's header is there."""
    return GUTENBERG_START.search(content.decode(errors="replace")) is not None


# In the order in which a file is tried; all that none of the others recognises is plain text.
FORMATS: dict[str, files.Format] = {
    "wikiextractor": files.Format(
        document="a <doc>",
        names=r"wiki_\d+",
        recognises=lambda content, file: content.startswith(b"<doc "),
        starts_document=lambda line, after_blank: line.startswith(b"<doc "),
        parse=parse_extracted,
    ),
    "mediawiki": files.Format(
        document="a page",
        names=r".*\.xml(?:-p\d+p\d+.*?)?",
        recognises=is_dump,
        starts_document=lambda line, after_blank: b"<page>" in line,
        parse=parse_pages,
    ),
    "jsonl": files.Format(
        document="a line",
        names=r".*\.jsonl?",
        recognises=is_json_lines,
        starts_document=lambda line, after_blank: not line.isspace(),
        parse=parse_line,
    ),
    "wikitext": files.Format(
        document="an article",
        names=r".*\.tokens",
        recognises=lambda content, file: re.search(rb"(?:\A|\n\s*\n\s?)= [^=\s].* =\s*\n", content) is not None,
        # A list of abbreviations may hold a line `= Games =` too, but not after a blank line.
        starts_document=lambda line, after_blank: after_blank and TITLE_LINE.match(line) is not None,
        parse=parse_article,
    ),
    # Plain-text books without Gutenberg's header are known by ``book:PATH`` alone; their names are those of texts.
    "book": files.Format(document="a file", names="(?!)", recognises=is_gutenberg, read_whole=read_book),
    "text": files.Format(
        document="what stands between blank lines (books: say book:PATH)",
        names=r".*\.txt",
        recognises=lambda content, file: True,
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


def read_piece(piece: files.Piece, watch: Optional[files.Watch] = None) -> Iterator[RawDocument]:
    """Documents in the order of the file; memory is bounded by the longest one.

    Raises:
        BadInput: names the file, the place and the reason; the documents before it were yielded.
    """
    watch = files.Watch() if watch is None else watch
    reader = FORMATS[piece.format]
    if reader.read_whole:
        yield RawDocument(1, reader.read_whole(piece.path, watch), {})
        return
    is_compressed = files.compression(piece.path) is not None
    number = 0
    for block in files.read_blocks(piece, reader.starts_document):
        for in_block, (text, metadata) in enumerate(reader.parse(block, piece, watch)):
            number += 1
            if not piece.start and piece.end is None:
                name: Union[int, str] = number
            elif is_compressed:
                name = f"@{piece.start}+{number}"
            else:
                name = f"@{block.offset}" + (f"+{in_block}" if in_block else "")
            yield RawDocument(name, text, metadata)
