"""Raw text -> the words that BPE sees: punctuation, case, Moses tokens, special tokens.

LazyFormer's appendix A: normalise, lower-case, tokenise (Moses); BPE follows in ``tokenizer.py``. Here Moses sees the
text cased: its rules for full stops read the case of what follows, and in lower-cased text of several sentences (a GLUE
pair, say) would leave the stops inside on their words, as pre-training on single sentences never does.
"""

import re
from dataclasses import dataclass, fields
from re import Pattern
from typing import Any

from lazyformer_fairseq.data.text.places import Span, places_of
from lazyformer_fairseq.errors import UserError

MASK = "<mask>"
UNKNOWN = "<unk>"
FIRST_SYMBOLS = ("<s>", "<pad>", "</s>", UNKNOWN)  # of every dictionary of fairseq's, with the ids 0 to 3
RESERVED_SYMBOLS = (*FIRST_SYMBOLS, MASK)


@dataclass(frozen=True)
class TextSettings:
    """All that decides a text's ids, apart from the sentencepiece model; UserError for an impossible value."""

    lower_case: bool = True
    """Lower-case the words (the paper's models are uncased)."""

    normalise_punctuation: bool = True
    """Moses punctuation normalisation: curly quotes, dashes, ellipses and the like become ASCII."""

    moses_tokenise: bool = True
    """Split words from punctuation by Moses' rules, without its XML escapes, so that ``<`` stays ``<``."""

    language: str = "en"
    """Two-letter language code; Moses' rules and abbreviations depend on it."""

    special_tokens: tuple[str, ...] = ("<url>", "<email>", "<file>")
    """Stand-ins that corpus cleaning leaves in the text, each one id; lower-case ASCII words in angle brackets."""

    character_coverage: float = 0.9999
    """Share of the training text's characters that get a piece of their own; the rarest others become ``<unk>``."""

    byte_fallback: bool = False
    """Spell characters without a piece in UTF-8 bytes (256 pieces of the vocabulary) instead of ``<unk>``.

    Off, because English hardly needs it: of 9 million words of Wikipedia and novels 0.04% of the tokens are such
    characters, mostly of names in other scripts, and 120 letters and signs have a piece. Bytes would take three tokens
    for each, and 256 pieces that a model of this text seldom sees. Turn it on for text of many scripts.
    """

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not type(field.default):
                expected = type(field.default).__name__
                raise UserError(f"text setting {field.name} = {value!r}: expected a value of type {expected}")
        if self.language != "en":
            from lazyformer_fairseq.data.text.moses import KNOWN_LANGUAGES  # half a second that English saves

            if self.language not in KNOWN_LANGUAGES:
                known = ", ".join(sorted(KNOWN_LANGUAGES))
                raise UserError(f"text setting language = {self.language!r}: Moses knows {known}")
        if not 0 < self.character_coverage <= 1:
            raise UserError(f"text setting character_coverage = {self.character_coverage}: must be in (0, 1]")
        for token in self.special_tokens:
            if not re.fullmatch(r"<[a-z]+>", token) or token in RESERVED_SYMBOLS:
                raise UserError(
                    f"text setting special_tokens holds {token!r}: each must be a lower-case word in angle brackets, "
                    f"like <url>, other than {', '.join(RESERVED_SYMBOLS)}"
                )
        if len(set(self.special_tokens)) < len(self.special_tokens):
            raise UserError(f"text setting special_tokens = {self.special_tokens}: a token is there twice")

    @classmethod
    def from_json(cls, values: Any) -> "TextSettings":
        """Settings from a JSON object that must name each of them, and nothing else; else UserError."""
        if not isinstance(values, dict):
            raise UserError(f"text settings {values!r}: expected a JSON object")
        names = {field.name for field in fields(cls)}
        if unknown := sorted(values.keys() - names):
            raise UserError(f"unknown text setting {', '.join(unknown)}; this version knows {', '.join(sorted(names))}")
        if missing := sorted(names - values.keys()):
            raise UserError(f"text setting {', '.join(missing)} is missing")
        special_tokens = values["special_tokens"]
        if not isinstance(special_tokens, list) or not all(isinstance(token, str) for token in special_tokens):
            raise UserError(f"text setting special_tokens = {special_tokens!r}: expected a list of strings")
        return cls(**{**values, "special_tokens": tuple(special_tokens)})


def symbol_pattern(settings: TextSettings) -> Pattern:
    """Finds the special tokens, ``<mask>`` and ``<unk>`` in any case, as one group: ``split`` keeps them."""
    symbols = "|".join(map(re.escape, (*settings.special_tokens, MASK, UNKNOWN)))
    return re.compile(f"({symbols})", re.IGNORECASE | re.ASCII)  # ASCII: no long s in <mask>


class TextNormaliser:
    """Applies the settings to one text (best a sentence) at a time, and undoes Moses' spacing for reading.

    First it takes the special tokens, ``<mask>`` and ``<unk>`` out of the text, whatever their case; they come back as
    words of their own.
    """

    def __init__(self, settings: TextSettings):
        from sacremoses import MosesDetokenizer

        from lazyformer_fairseq.data.text.moses import moses_words

        self.settings = settings
        self._symbol = symbol_pattern(settings)
        self._words = moses_words(settings.language, settings.normalise_punctuation, settings.moses_tokenise)
        self._moses_back = MosesDetokenizer(settings.language)

    def __call__(self, text: str) -> str:
        """The words and symbols of ``text``, divided by single spaces."""
        if "<" not in text:
            return self._normalise_plain(text)
        parts = self._symbol.split(text)
        parts[0::2] = map(self._normalise_plain, parts[0::2])
        parts[1::2] = map(str.lower, parts[1::2])
        return " ".join(filter(None, parts))

    def with_places(self, text: str) -> tuple[str, list[Span]]:
        """What calling this returns, and for each of its characters the span of `text` that it came from."""
        words: list[str] = []
        places: list[Span] = []
        start = 0
        for number, part in enumerate(self._symbol.split(text)):
            made = part.lower() if number % 2 else self._normalise_plain(part)
            if made:
                if words:
                    places.append((start, start))
                words.append(made)
                found = [(at, at + 1) for at in range(len(part))] if number % 2 else places_of(made, part)
                places += [(start + first, start + last) for first, last in found]
            start += len(part)
        return " ".join(words), places

    def _normalise_plain(self, text: str) -> str:
        words = self._words(text)
        return words.lower() if self.settings.lower_case else words

    def readable(self, words: str) -> str:
        """Text with ordinary spacing again: Moses' own way back, which is not exact for every quote."""
        if not self.settings.moses_tokenise:
            return words
        return self._moses_back.detokenize(words.split(), unescape=False)
