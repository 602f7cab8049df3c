"""Words of MediaWiki that differ between the Wikipedias: namespaces, options of pictures, disambiguation.

``wiki_words.txt`` has those of the larger ones. All of them count in every text, whatever its language: what is left of
the markup in a text of WikiExtractor or in JSON lines comes without its language. The head of a dump has the namespaces
of its wiki, whichever it is.
"""

import re
from pathlib import Path

FILES_CATEGORIES_MEDIA = ("6", "14", "-2")  # keys of namespaces
NAMESPACE = re.compile(rb'<namespace key="(-?\d+)"[^<>]*>([^<>]*)</namespace>')


def read_table() -> dict[str, list[frozenset[str]]]:
    """Return, by language, the sets of words in the columns of ``wiki_words.txt``."""
    table = {}
    for line in Path(__file__).with_name("wiki_words.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        language, *columns = line.split("|")
        columns += [""] * (4 - len(columns))
        table[language.strip()] = [frozenset(map(plain, column.split())) for column in columns]
    return table


def plain(name: str) -> str:
    """Return a name as MediaWiki compares it: without regard to case, underscores and the space around it."""
    return " ".join(name.replace("_", " ").split()).casefold()


TABLE = read_table()
LEFT_OUT_NAMESPACES, SMALL_PICTURE, PICTURE_OPTIONS, DISAMBIGUATION = (
    frozenset().union(*column) for column in zip(*TABLE.values(), strict=True)
)


def left_out_namespaces_of(head: bytes) -> tuple[str, ...]:
    """Return a wiki's own names of files, categories and media, from the head of its dump; empty if it has none."""
    found = NAMESPACE.findall(head)
    return tuple(plain(name.decode(errors="replace")) for key, name in found if key.decode() in FILES_CATEGORIES_MEDIA)
