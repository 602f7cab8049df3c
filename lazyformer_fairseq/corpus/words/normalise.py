"""Step: cased sentences -> the words that BPE sees."""

import re
from functools import lru_cache, partial
from typing import Optional, Union

from datatrove.data import Document

from lazyformer_fairseq.corpus.step import DocumentStep
from lazyformer_fairseq.data.text.library.words import LibraryNormaliser, LibrarySettings
from lazyformer_fairseq.data.text.load_tokenizer import normaliser_of
from lazyformer_fairseq.data.text.normalisation import RESERVED_SYMBOLS, UNKNOWN, TextSettings

WIKITEXT = "wikitext"


class NormaliseWords(DocumentStep):
    """Each line (a cased sentence) becomes its normalised words, divided by single spaces; lines without any go.

    A literal ``<mask>``, ``</s>`` or other symbol of the model, in a text that mentions it, is written plain, like
    ``< mask >``: only the task may mask. Stand-ins of cleaning such as ``<url>`` stay, and so does the ``<unk>`` by
    which WikiText has replaced its rare words. A tokenizer that came with another model writes symbols plain by itself.

    Dropped: documents with ``no word`` left.
    """

    name = "words"

    def __init__(self, settings: Union[TextSettings, LibrarySettings]):
        super().__init__()
        self.settings = settings

    def process(self, document: Document) -> Optional[str]:
        text, normalise = document.text, load_normaliser(self.settings)
        if "<" in text:
            keep_unknown = document.metadata.get("format") == WIKITEXT
            if isinstance(normalise, LibraryNormaliser):
                normalise = partial(normalise, keep_unknown=keep_unknown)
            else:
                text = with_plain_symbols(text, keep_unknown)
        document.text = "\n".join(filter(None, map(normalise, text.split("\n"))))
        return None if document.text else "no word"


load_normaliser = lru_cache(maxsize=1)(normaliser_of)  # once per process, for any number of units


def with_plain_symbols(text: str, keep_unknown: bool = False) -> str:
    """``text`` with the model's own symbols spelt as words between brackets: ``<mask>`` becomes ``< mask >``.

    Args:
        keep_unknown: leave ``<unk>`` as it is, an unknown word.
    """

    def spelt(symbol: re.Match) -> str:
        return symbol[0] if keep_unknown and symbol[0].lower() == UNKNOWN else f"< {symbol[1]} >"

    return _SYMBOLS.sub(spelt, text)


_SYMBOLS = re.compile(f"<({'|'.join(symbol[1:-1] for symbol in RESERVED_SYMBOLS)})>", re.IGNORECASE | re.ASCII)
