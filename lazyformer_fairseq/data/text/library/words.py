"""Text -> the words of a tokenizer that came with another model: its own normalisation and its own division.

Such a tokenizer cuts a text into words ("pre-tokens") before it cuts the words into pieces, each by itself. BERT's are
words and marks. RoBERTa's are bytes written as letters, ``Ġ`` for the space before a word, so whether a space stands
there is part of the word, and the word alone decides its pieces.
"""

import json
from dataclasses import dataclass
from functools import lru_cache

UNKNOWN_OF_CORPUS = "<unk>"  # by which WikiText has replaced its rare words


@dataclass(frozen=True)
class LibrarySettings:
    """All that decides a text's words.

    Attributes:
        normaliser, division: as the library's JSON has its `normalizer` and `pre_tokenizer`.
        unknown: the symbol of unknown words.
    """

    normaliser: str
    division: str
    unknown: str

    special_tokens: tuple[str, ...] = ()
    """None: such a tokenizer spells ``<url>`` as it spells any text."""


class LibraryNormaliser:
    """Applies the settings to one text (best a sentence) at a time. No symbol of the model comes out of a text."""

    def __init__(self, settings: LibrarySettings):
        self.settings = settings
        self._normaliser, self._division = _components(settings.normaliser, settings.division)

    def __reduce__(self):
        return LibraryNormaliser, (self.settings,)

    def __call__(self, text: str, keep_unknown: bool = False) -> str:
        """The words of ``text``, divided by single spaces.

        Args:
            keep_unknown: ``<unk>`` in a text is an unknown word.
        """
        if not keep_unknown:
            return self._words(text)
        parts = [
            part for plain in text.split(UNKNOWN_OF_CORPUS) for part in (self._words(plain), self.settings.unknown)
        ]
        return " ".join(filter(None, parts[:-1]))

    def _words(self, text: str) -> str:
        if self._normaliser is not None:
            text = self._normaliser.normalize_str(text)
        return " ".join(word for word, _ in self._division.pre_tokenize_str(text))


@lru_cache(maxsize=4)
def _components(normaliser: str, division: str) -> tuple:
    from tokenizers import Tokenizer

    model = {"type": "WordLevel", "vocab": {}, "unk_token": UNKNOWN_OF_CORPUS}
    parts = {"normalizer": json.loads(normaliser), "pre_tokenizer": json.loads(division), "model": model}
    library = Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **parts}))
    return library.normalizer, library.pre_tokenizer
