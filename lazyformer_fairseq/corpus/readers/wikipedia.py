"""Wikipedia: MediaWiki's XML export, and what WikiExtractor makes of it."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html import unescape
from pathlib import Path

from lazyformer_fairseq.corpus.readers.files import BadInput, Block, Format, Piece, Watch, decode, place
from lazyformer_fairseq.corpus.readers.plain_text import lines_to_paragraphs, without_title
from lazyformer_fairseq.errors import UserError

PAGE = re.compile(r"<page\b.*?</page\s*>", re.DOTALL)  # inside of text `<` is escaped
REST = re.compile(r"\s*(?:</mediawiki\s*>\s*)?")
TITLE = re.compile(r'\btitle="(.*?)"\s*>')
END = re.compile(r"^</doc>\s*", re.MULTILINE)


def is_dump(content: bytes, file: Path) -> bool:
    """Whether MediaWiki wrote this; a UserError for other XML and HTML."""
    if b"<mediawiki" in content[:1000] or content.startswith(b"<page>"):
        return True
    if re.match(rb"<\?xml|<!DOCTYPE|<html", content, re.I):
        raise UserError(f"{file}: is XML or HTML, but no MediaWiki dump; convert it, or leave it out")
    return False


def parse_pages(block: Block, piece: Piece, watch: Watch) -> Iterator[tuple[str, dict]]:
    """Raw wiki markup of a page with {"title", "namespace", "model", "is_redirect"}; its last revision counts.

    ``<page>``s stand inside ``<mediawiki>`` or, in a part of a dump, without it.
    """
    if block.is_preamble:  # <mediawiki> and <siteinfo>
        return
    text = decode(block.content, watch)
    end = text.index("<page>")
    for match in PAGE.finditer(text):
        if text[end : match.start()].strip():
            break
        end = match.end()
        line = block.line + text.count("\n", 0, match.start())
        yield _parse_page(match.group(), piece, line)
    if not REST.fullmatch(text, end):
        line = block.line + text.count("\n", 0, end)
        raise BadInput(f"{place(piece, line)}: malformed XML: no whole <page>...</page>; is the file whole?")


def _parse_page(xml: str, piece: Piece, line: int) -> tuple[str, dict]:
    try:
        # A <page> alone has no document type, the only place where XML can name other files or entities.
        page = ElementTree.fromstring(xml)  # noqa: S314
    except ElementTree.ParseError as error:
        line += error.position[0] - 1
        raise BadInput(f"{place(piece, line)}: malformed XML ({str(error).partition(':')[0]})") from None
    revisions = page.findall("revision")
    last = revisions[-1] if revisions else page
    return last.findtext("text") or "", {
        "title": page.findtext("title") or "",
        "namespace": page.findtext("ns") or "0",
        "model": last.findtext("model") or "wikitext",
        "is_redirect": page.find("redirect") is not None,
    }


def parse_extracted(block: Block, piece: Piece, watch: Watch) -> Iterator[tuple[str, dict]]:
    """The paragraphs of ``<doc id=... title="...">``, title, paragraphs, ``</doc>``, without the title.

    BadInput names the line of an element that is broken.
    """
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


MEDIAWIKI = Format(
    document="a page",
    names=r".*\.xml(?:-p\d+p\d+.*?)?",
    recognises=is_dump,
    starts_document=lambda line, after_blank: b"<page>" in line,
    parse=parse_pages,
    extension="xml",
)
WIKIEXTRACTOR = Format(
    document="a <doc>",
    names=r"wiki_\d+",
    recognises=lambda content, file: content.startswith(b"<doc "),
    starts_document=lambda line, after_blank: line.startswith(b"<doc "),
    parse=parse_extracted,
)
