"""English prose that every CPython carries: the topics of ``help()``, docstrings and comments of the standard library.

Some 1.4 MB. The modules are parsed, never imported. What is not prose (code, tables, headings, lists of names) is left
out, paragraph by paragraph.
"""

import ast
import json
import re
import sysconfig
import warnings
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple, Optional

from lazyformer_fairseq.storage.atomic import atomic_file

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
FEWEST_WORDS = 6

COMMENT = re.compile(r"(?:^[ \t]*#(?:[ \t].*)?\n)+", re.MULTILINE)
COMMENT_MARK = re.compile(r"^[ \t]*# ?", re.MULTILINE)
LIST_MARK = re.compile(r"^\s*(?:[*+-]|\(?\d+[.)]|\(?[a-z]\))\s+")
CODE_LINE = re.compile(r"^\s*(?:>>>|\.\.\.( |$)|\.\. |:\w+.*:|#|\$ |@\w+|\||\+[-=]|[-=~*^_]{3,}\s*$|[-=]{3,} )")
INLINE_ROLE = re.compile(r":(?:\w+:)?\w+:`~?([^`]*)`")
INLINE_LITERAL = re.compile(r"``?([^`\n]+)``?")
EMPHASIS = re.compile(r"(?<!\w)(\*{1,2})(\w(?:[^*\n]*\w)?)\1(?!\w)")
CODE_SIGNS = re.compile(r"::=|->|==|!=|\w\(.*,.*\)|[{}\\|]|[=<>+*/&^%]\s|__\w+__\s*=|\w=\w|\s=\s")
FUNCTION_WORD = re.compile(
    r"\b(?:the|a|an|is|are|was|be|of|to|in|on|for|if|it|that|this|which|when|and|or|not|with|from|by|as|can|will)\b"
)
NOT_FOR_READERS = re.compile(r"\b(?:XXX|TODO|FIXME|Copyright|Licensed)\b")
PLAIN_WORD = re.compile(r"^[\"'(\[]*[A-Za-z]+(?:['’-][A-Za-z]+)*[\"'.,:;!?)\]]*$")


class Prose(NamedTuple):
    """What a topic or a module says, in paragraphs."""

    name: str
    paragraphs: tuple[str, ...]


def python_prose() -> Iterator[Prose]:
    """One document a topic, then one a module, each paragraph once: the same on every run of one Python version."""
    seen: set[str] = set()
    for name, texts in _sources():
        paragraphs = []
        for paragraph in (paragraph for text in texts for paragraph in paragraphs_of_prose(text)):
            if paragraph not in seen:
                seen.add(paragraph)
                paragraphs.append(paragraph)
        if paragraphs:
            yield Prose(name, tuple(paragraphs))


def write_prose(path: Path) -> Path:
    """Writes the documents as JSON lines, unless the file is there. Returns `path`."""
    if not path.exists():
        with atomic_file(path) as file:
            for prose in python_prose():
                file.write((json.dumps({"text": "\n".join(prose.paragraphs)}) + "\n").encode())
    return path


def _sources() -> Iterator[tuple[str, list[str]]]:
    for name in sorted(topics):
        yield f"topic:{name}", [topics[name]]
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        place = file.relative_to(library)
        if not SKIPPED_FOLDERS & set(place.parts):
            yield f"module:{place.as_posix()}", texts_of_module(file)


def texts_of_module(file: Path) -> list[str]:
    """The docstrings, then the comments of a module, each in order of place; none of a file that is not Python."""
    try:
        source = file.read_text(encoding="utf-8")
        return docstrings(source) + [COMMENT_MARK.sub("", comment) for comment in COMMENT.findall(source)]
    except (OSError, SyntaxError, ValueError):
        return []


def docstrings(source: str) -> list[str]:
    """Docstrings of a module, its classes and functions in order of place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the library's own source, such as invalid escapes
        tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for text in map(ast.get_docstring, nodes) if text]


def paragraphs_of_prose(text: str) -> Iterator[str]:
    """The paragraphs of English sentences in reStructuredText-like ``text``, unwrapped and without inline markup."""
    for block in _blocks(cleandoc(text).splitlines()):
        paragraph = _unwrapped(block)
        if paragraph is not None and _reads_like_english(paragraph):
            yield paragraph


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Runs of lines between blank lines; an item of a list starts a new one."""
    block: list[str] = []
    for line in [*lines, ""]:
        if block and (not line.strip() or LIST_MARK.match(line)):
            yield block
            block = []
        if line.strip():
            block.append(line)


def _unwrapped(block: list[str]) -> Optional[str]:
    """The block as one line, or None where it is code, a table, a heading or of uneven indentation."""
    first, rest = LIST_MARK.sub("", block[0]), block[1:]
    indents = {len(line) - len(line.lstrip()) for line in rest}
    if len(indents) > 1 or any(CODE_LINE.match(line) for line in (first, *rest)):
        return None
    text = " ".join(" ".join((first, *rest)).split())
    text = INLINE_ROLE.sub(r"\1", text)
    text = INLINE_LITERAL.sub(r"\1", text)
    return EMPHASIS.sub(r"\2", text)


def _reads_like_english(paragraph: str) -> bool:
    words = paragraph.split()
    if (
        len(words) < FEWEST_WORDS
        or not re.match(r"[\"'(]?[A-Z]", paragraph)
        or not re.search(r"[.?!][\"')]*$", paragraph)
    ):
        return False
    if CODE_SIGNS.search(paragraph) or NOT_FOR_READERS.search(paragraph) or not FUNCTION_WORD.search(paragraph):
        return False
    return sum(bool(PLAIN_WORD.match(word)) for word in words) >= 0.8 * len(words)
