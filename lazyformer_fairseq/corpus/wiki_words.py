"""The words of MediaWiki that differ between the Wikipedias: namespaces, options of pictures, disambiguation.

``wiki_words.txt`` has the words of the larger Wikipedias. All of them apply to every text, because remnants of markup
in WikiExtractor's output or in JSON lines come without their language. The head of a dump names the namespaces of its
own wiki, whatever the language.
"""

import re
from pathlib import Path

FILES_CATEGORIES_MEDIA = ("6", "14", "-2")  # MediaWiki's keys of these namespaces
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
    """Return a name in the form in which MediaWiki compares it, regardless of case, underscores and outer spaces."""
    return " ".join(name.replace("_", " ").split()).casefold()


TABLE = read_table()
LEFT_OUT_NAMESPACES, SMALL_PICTURE, PICTURE_OPTIONS, DISAMBIGUATION = (
    frozenset().union(*column) for column in zip(*TABLE.values(), strict=True)
)


def left_out_namespaces_of(head: bytes) -> tuple[str, ...]:
    """Return a wiki's own names of the namespaces of files, categories and media, from the head of its dump."""
    found = NAMESPACE.findall(head)
    return tuple(plain(name.decode(errors="replace")) for key, name in found if key.decode() in FILES_CATEGORIES_MEDIA)
