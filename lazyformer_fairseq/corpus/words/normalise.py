"""Step: cased sentences -> the words that BPE sees."""

import re
from functools import lru_cache
from typing import Optional

from datatrove.data import Document

from lazyformer_fairseq.corpus.step import DocumentStep
from lazyformer_fairseq.data.text.normalisation import RESERVED_SYMBOLS, UNKNOWN, TextNormaliser, TextSettings

WIKITEXT = "wikitext"


class NormaliseWords(DocumentStep):
    """Each line (a cased sentence) becomes its normalised words, divided by single spaces; lines without any go.

    A literal ``<mask>``, ``</s>`` or other symbol of the model, in a text that mentions it, is written plain, like
    ``< mask >``: only the task may mask. Stand-ins of cleaning such as ``<url>`` stay, and so does the ``<unk>`` by
    which WikiText has replaced its rare words.

    Dropped: documents with ``no word`` left.
    """

    name = "words"

    def __init__(self, settings: TextSettings):
        super().__init__()
        self.settings = settings

    def process(self, document: Document) -> Optional[str]:
        text = document.text
        if "<" in text:
            text = with_plain_symbols(text, keep_unknown=document.metadata.get("format") == WIKITEXT)
        document.text = "\n".join(filter(None, map(load_normaliser(self.settings), text.split("\n"))))
        return None if document.text else "no word"


load_normaliser = lru_cache(maxsize=1)(TextNormaliser)  # once per process, for any number of units


def with_plain_symbols(text: str, keep_unknown: bool = False) -> str:
    """``text`` with the model's own symbols spelt as words between brackets: ``<mask>`` becomes ``< mask >``.

    Args:
        keep_unknown: leave ``<unk>`` as it is, an unknown word.
    """

    def spelt(symbol: re.Match) -> str:
        return symbol[0] if keep_unknown and symbol[0].lower() == UNKNOWN else f"< {symbol[1]} >"

    return _SYMBOLS.sub(spelt, text)


_SYMBOLS = re.compile(f"<({'|'.join(symbol[1:-1] for symbol in RESERVED_SYMBOLS)})>", re.IGNORECASE | re.ASCII)
