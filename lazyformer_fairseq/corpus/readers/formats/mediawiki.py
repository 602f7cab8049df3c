"""MediaWiki's XML export: ``<page>``s, inside ``<mediawiki>`` or, in a part of a dump, without it.

A page's text is raw wiki markup; the last of several revisions counts.
"""

import re
import xml.etree.ElementTree as ElementTree  # nosec B405 # see _parse_page
from collections.abc import Iterator

from lazyformer_fairseq.corpus.readers.blocks import Block, Piece, Watch, decode, place
from lazyformer_fairseq.corpus.readers.compressed import BadInput

PAGE = re.compile(r"<page\b.*?</page\s*>", re.DOTALL)  # inside of text `<` is escaped
REST = re.compile(r"\s*(?:</mediawiki\s*>\s*)?")


def starts_document(line: bytes, after_blank: bool) -> bool:
    return b"<page>" in line


def parse(block: Block, piece: Piece, watch: Watch) -> Iterator[tuple[str, dict]]:
    """Text of a page with {"title", "namespace", "model", "is_redirect"}."""
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
        page = ElementTree.fromstring(xml)  # nosec B314
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
