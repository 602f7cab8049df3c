"""Books, ``.txt`` or ``.epub``: the whole file is one document; Project Gutenberg's header and licence are cut off.

An epub is a zip of XHTML files with a list of them: `zipfile` and lxml are enough, and do not mind errors in its table
of contents and pictures. Its text is that of the documents of its spine in order, each block element a paragraph.
"""

import codecs
import io
import lzma
import posixpath
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from lxml import etree

from lazyformer_fairseq.corpus.readers.files import BOM, BadInput, Format, Watch, decode, open_decompressed

INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd mark q s samp small span strike strong sub "
    "sup time tt u var wbr".split()
)
LEFT_OUT = frozenset("script style head nav svg math audio video template".split())
LINE_BREAKS = re.compile(r"\s*\n\s*")
# Limits of what is unpacked in memory: this many times the epub's size, or this many bytes where that is more.
MOST_TIMES, BEYOND_BYTES = 200, 1 << 26

DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, NotImplementedError, RuntimeError),
    *(ValueError, LookupError, OSError),
)


def is_epub(content: bytes) -> bool:
    return content.startswith(b"PK\x03\x04")


def read_epub(path: str, content: bytes) -> str:
    """Paragraphs divided by blank lines.

    Raises:
        BadInput: not a zip, not an epub, or one without any text (scanned pages, say, or encrypted).
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            reader = _Reader(archive, max(BEYOND_BYTES, MOST_TIMES * len(content)), path)
            text = "\n\n".join(_text_of(page) for page in _pages(reader))
    except BadInput:
        raise
    except KeyError as error:
        raise BadInput(f"{path}: no epub, or a damaged one: {error.args[0]}") from None
    except etree.XMLSyntaxError as error:
        raise BadInput(f"{path}: the epub's list of files is malformed XML ({error})") from None
    except DAMAGE as error:
        reason = f"{str(error) or repr(error):.200}"
        raise BadInput(f"{path}: the epub is damaged ({reason}); get it again, or leave it out") from None
    if not text.strip():
        raise BadInput(f"{path}: the epub holds no text")
    return text


class _Reader:
    """Reads members of an epub into memory, never to disk, as long as they are not too large all together."""

    def __init__(self, archive: zipfile.ZipFile, most: int, path: str):
        self._archive, self._left, self._path = archive, most, path

    def read(self, name: str) -> bytes:
        self._left -= self._archive.getinfo(name).file_size  # no more is unpacked than is declared there
        if self._left < 0:
            raise BadInput(f"{self._path}: the epub unpacks to more than {MOST_TIMES} times its size; no book does")
        return self._archive.read(name)


def _pages(archive: _Reader) -> Iterator[bytes]:
    """XHTML files in reading order, without the navigation."""
    container = etree.fromstring(archive.read("META-INF/container.xml"), _xml_parser())
    package_path = next((e.get("full-path") for e in container.iter("{*}rootfile")), "")
    package = etree.fromstring(archive.read(package_path), _xml_parser())
    folder = posixpath.dirname(package_path)
    items = {item.get("id"): item for item in package.iter("{*}item")}
    for reference in package.iter("{*}itemref"):
        item = items.get(reference.get("idref"))
        if item is None or "nav" in item.get("properties", "").split() or reference.get("linear") == "no":
            continue
        yield archive.read(posixpath.normpath(posixpath.join(folder, unquote(item.get("href", "")))))


def _text_of(page: bytes) -> str:
    try:
        root = etree.fromstring(page, _xml_parser(huge_tree=True))
    except etree.XMLSyntaxError:  # HTML's names such as &nbsp;, or plainly wrong: as a browser would read it
        root = etree.fromstring(page, etree.HTMLParser(encoding=_encoding(page), huge_tree=True))
    return "" if root is None else "".join(_parts(root))


def _xml_parser(**options) -> etree.XMLParser:
    """Follows no entity, neither one of another file nor one that stands for a million others."""
    return etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, **options)


def _encoding(page: bytes) -> str:
    declared = re.search(rb"""encoding=["']([\w-]+)["']""", page[:200])
    name = declared.group(1).decode() if declared else "utf-8"
    try:
        return codecs.lookup(name).name
    except LookupError:
        return "utf-8"


def _parts(root: etree._Element) -> Iterator[str]:
    """Text in order, with a blank line at each border of a block element."""
    walk = etree.iterwalk(root, events=("start", "end", "comment", "pi"))
    for event, element in walk:
        # Not etree.QName: it refuses names that a browser takes.
        tag = element.tag.rpartition("}")[2].lower() if isinstance(element.tag, str) else ""
        border = "\n\n" if tag and tag not in INLINE | LEFT_OUT | {"br"} else ""
        if event == "start":
            if tag in LEFT_OUT:
                walk.skip_subtree()
                continue
            yield border + LINE_BREAKS.sub("\n", element.text or "") + ("\n" if tag == "br" else "")
        else:
            yield border + LINE_BREAKS.sub("\n", element.tail or "")


# Books break "well-known" after its hyphen, never inside "known": the hyphen is the word's own and stays.
HYPHEN_AT_LINE_END = re.compile(r"-(?<=[^\W\d_]-)[^\S\n]*\n\s*(?=[a-zß-öø-ÿ])")
BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")


def join_hard_wrapped(text: str) -> str:
    """One paragraph from lines that were broken to fit a page."""
    return " ".join(HYPHEN_AT_LINE_END.sub("-", text).split())


def blocks_to_paragraphs(text: str) -> str:
    """One paragraph a line, from hard-wrapped paragraphs that blank lines divide."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(filter(None, map(join_hard_wrapped, BLANK_LINES.split(text))))


# Until about 2004 the header ended with "The Small Print".
GUTENBERG_START = re.compile(r"\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG\b.*|\*END\*? ?THE SMALL PRINT.*")
GUTENBERG_END = re.compile(
    r"^(?:\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG\b|End of (?:the |this )?Project Gutenberg\b)", re.MULTILINE
)
GUTENBERG_CREDITS = re.compile(r"\A(?:(?:Produced|E-?text prepared|Transcribed|Prepared) by .*\n)", re.I)


def read_book(path: str, watch: Watch) -> str:
    """One paragraph a line.

    Raises:
        BadInput: an epub that is not one, or has no text; damaged compressed data.
    """
    with open_decompressed(path) as file:
        content = file.read()
    text = read_epub(path, content) if is_epub(content) else decode(content.removeprefix(BOM), watch)
    return without_gutenberg_notices(blocks_to_paragraphs(text))


def without_gutenberg_notices(text: str) -> str:
    """The book itself, from a text with one paragraph a line."""
    end = GUTENBERG_END.search(text)
    text = text[: end.start()] if end else text
    start = GUTENBERG_START.search(text)
    text = text[start.end() :].lstrip("\n") if start else text
    return GUTENBERG_CREDITS.sub("", text).rstrip("\n")


def is_gutenberg(content: bytes, file: Path) -> bool:
    """Whether Project Gutenberg's header is there; plain-text books without it are known by ``book:PATH`` alone."""
    return GUTENBERG_START.search(content.decode(errors="replace")) is not None


BOOK = Format(document="a file", names=r".*\.epub", recognises=is_gutenberg, read_whole=read_book)
