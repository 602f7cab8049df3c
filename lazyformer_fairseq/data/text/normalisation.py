"""Raw text -> the words that BPE sees: punctuation, case, Moses tokens, special tokens.

LazyFormer's appendix A: normalise, lower-case, tokenise (Moses); BPE follows in ``tokenizer.py``. Here Moses sees the
text cased: its rules for full stops read the case of what follows, and in lower-cased text of several sentences (a GLUE
pair, say) would leave the stops inside on their words, as pre-training on single sentences never does.
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from re import Pattern
from typing import Any, ClassVar

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.checked import as_type

SPACE = "\u2581"  # sentencepiece's own sign for it
MASK = "<mask>"
UNKNOWN = "<unk>"
# Of every dictionary of fairseq's, with the ids 0 to 3.
FIRST_SYMBOLS = (
    "<s>",
    "<pad>",
    "</s>",
    UNKNOWN,
)
BOS, PAD, EOS, UNK = range(len(FIRST_SYMBOLS))
RESERVED_SYMBOLS = (*FIRST_SYMBOLS, MASK)
COPY_AGAIN = "copy the whole tokenizer folder again"


@dataclass(frozen=True)
class TextSettings:
    """All that decides a text's ids, apart from the sentencepiece model; UserError for an impossible value."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

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

    def __post_init__(self) -> None:
        if self.language != "en":
            # Half a second that English saves.
            from lazyformer_fairseq.data.text.moses import KNOWN_LANGUAGES

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
    def from_json(cls, values: dict[str, Any], path: Path) -> "TextSettings":
        """Return settings from an object of a JSON file that names each of them, and nothing else.

        Raises:
            UserError: a setting is missing, not known or impossible; the message names the file.
        """
        missing = sorted({field.name for field in fields(cls)} - values.keys())
        if missing:
            raise UserError(f"{path}: text setting {', '.join(missing)} is missing; {COPY_AGAIN}")
        return as_type(cls, values, path, COPY_AGAIN)


def symbol_pattern(settings: TextSettings) -> Pattern:
    """Find the special tokens, ``<mask>`` and ``<unk>`` in any case, as one group: ``split`` keeps them."""
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
        self._words = moses_words(
            settings.language,
            settings.normalise_punctuation,
            settings.moses_tokenise,
        )
        self._moses_back = MosesDetokenizer(settings.language)

    def __call__(self, text: str) -> str:
        """Return the words and symbols of ``text``, divided by single spaces."""
        if "<" not in text:
            return self._normalise_plain(text)
        parts = self._symbol.split(text)
        parts[0::2] = map(self._normalise_plain, parts[0::2])
        parts[1::2] = map(str.lower, parts[1::2])
        return " ".join(filter(None, parts))

    def _normalise_plain(self, text: str) -> str:
        words = self._words(text)
        if self.settings.lower_case:
            return words.lower()
        return words

    def readable(self, words: str) -> str:
        """Text with ordinary spacing again: Moses' own way back, which is not exact for every quote."""
        if not self.settings.moses_tokenise:
            return words
        return self._moses_back.detokenize(words.split(), unescape=False)
