"""MediaWiki keywords that differ between Wikipedias: namespaces, image options, disambiguation templates.

``wiki_words.txt`` lists the keywords of the larger Wikipedias. Every text is searched for all of them, because the
language of markup remnants in WikiExtractor output or JSON lines is unknown. The header of a dump, in any language,
lists the wiki's own names for its namespaces.
"""

import re
from pathlib import Path

FILES_CATEGORIES_MEDIA = ("6", "14", "-2")  # MediaWiki's keys for these namespaces
NAMESPACE = re.compile(rb'<namespace key="(-?\d+)"[^<>]*>([^<>]*)</namespace>')


def read_table() -> dict[str, list[frozenset[str]]]:
    """Read ``wiki_words.txt`` into a dictionary that contains, for each language, one set of words per column."""
    table = {}
    path = Path(__file__).with_name("wiki_words.txt")
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        language, *columns = line.split("|")
        columns += [""] * (4 - len(columns))
        table[language.strip()] = [frozenset(map(plain, column.split())) for column in columns]
    return table


def plain(name: str) -> str:
    """Normalize a name as MediaWiki does for comparisons, ignoring case, underscores and surrounding spaces."""
    return " ".join(name.replace("_", " ").split()).casefold()


TABLE = read_table()
LEFT_OUT_NAMESPACES, SMALL_PICTURE, PICTURE_OPTIONS, DISAMBIGUATION = (
    frozenset().union(*column) for column in zip(*TABLE.values(), strict=True)
)


def left_out_namespaces_of(head: bytes) -> tuple[str, ...]:
    """Return a wiki's own names for its file, category and media namespaces, from the header of its dump."""
    names = []
    for key, name in NAMESPACE.findall(head):
        if key.decode() in FILES_CATEGORIES_MEDIA:
            names.append(plain(name.decode(errors="replace")))
    return tuple(names)
