"""Step: cased sentences -> the words that BPE sees."""

import re
from functools import cached_property
from typing import Optional

from datatrove.data import Document

from lazyformer_fairseq.corpus.step import DocumentStep, TaskNotes
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

    def __init__(self, settings: TextSettings, notes: Optional[TaskNotes] = None):
        super().__init__(notes)
        self.settings = settings

    @cached_property
    def _normalise(self) -> TextNormaliser:
        return TextNormaliser(self.settings)

    def process(self, document: Document) -> Optional[str]:
        text = document.text
        if "<" in text:
            text = with_plain_symbols(text, keep_unknown=document.metadata.get("format") == WIKITEXT)
        document.text = "\n".join(filter(None, map(self._normalise, text.split("\n"))))
        return None if document.text else "no word"

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_normalise"}


def with_plain_symbols(text: str, keep_unknown: bool = False) -> str:
    """``text`` with the model's own symbols spelt as words between brackets: ``<mask>`` becomes ``< mask >``.

    Args:
        keep_unknown: leave ``<unk>`` as it is, an unknown word.
    """
    return _SYMBOLS_BUT_UNKNOWN.sub(r"< \1 >", text) if keep_unknown else _SYMBOLS.sub(r"< \1 >", text)


def _any_of(symbols: list[str]) -> re.Pattern:
    return re.compile(f"<({'|'.join(symbol[1:-1] for symbol in symbols)})>", re.IGNORECASE | re.ASCII)


_SYMBOLS = _any_of([*RESERVED_SYMBOLS])
_SYMBOLS_BUT_UNKNOWN = _any_of([symbol for symbol in RESERVED_SYMBOLS if symbol != UNKNOWN])
