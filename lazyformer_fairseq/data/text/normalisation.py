"""Normalization of raw text into words for BPE: punctuation, case, Moses tokenization, special tokens.

LazyFormer (appendix A) normalizes the text, lowercases it and tokenizes it with Moses. Here, BPE follows in
``tokenizer.py``, and Moses runs before lowercasing, because its rules for periods depend on the case of the next word.
In lowercased text with several sentences (such as a GLUE pair), inner periods would stay attached to their words, which
never happens in pre-training on single sentences.
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from re import Pattern
from typing import Any, ClassVar

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.checked import as_type

SPACE = "\u2581"  # sentencepiece's symbol for a space
MASK = "<mask>"
UNKNOWN = "<unk>"
# Every fairseq dictionary starts with these symbols, with ids 0 to 3.
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
    """Text normalization settings, which together with the sentencepiece model determine a text's ids.

    Raises:
        UserError: a value is invalid.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    lower_case: bool = True
    """Lowercase the words (the paper's models are uncased)."""

    normalise_punctuation: bool = True
    """Apply Moses' punctuation normalization, which maps curly quotes, dashes, ellipses, etc. to ASCII."""

    moses_tokenise: bool = True
    """Separate words from punctuation with Moses' rules, but without XML escapes: ``<`` stays ``<``."""

    language: str = "en"
    """Two-letter language code, which determines Moses' rules and abbreviations."""

    special_tokens: tuple[str, ...] = ("<url>", "<email>", "<file>")
    """Placeholders that corpus cleaning leaves in the text: lowercase ASCII words in angle brackets, with one id each.
    """

    character_coverage: float = 0.9999
    """Fraction of the training text's characters that the vocabulary covers; the rarest ones become ``<unk>``."""

    byte_fallback: bool = False
    """Encode characters without a piece as UTF-8 bytes (256 pieces of the vocabulary) instead of as ``<unk>``.

    It is off by default because English rarely needs it. In 9 million words of Wikipedia and novels, such characters
    make up 0.04% of the tokens, mostly in names in other scripts, while 120 letters and signs have a piece. Bytes would
    cost three tokens per such character and take up 256 pieces that a model rarely encounters in this text. Turn it on
    for text in many scripts.
    """

    def __post_init__(self) -> None:
        if self.language != "en":
            # This import takes half a second and is not needed for English.
            from lazyformer_fairseq.data.text.moses import KNOWN_LANGUAGES

            if self.language not in KNOWN_LANGUAGES:
                known = ", ".join(sorted(KNOWN_LANGUAGES))
                raise UserError(f"text setting language = {self.language!r}: must be supported by Moses ({known})")
        if not 0 < self.character_coverage <= 1:
            raise UserError(f"text setting character_coverage = {self.character_coverage}: must be in (0, 1]")
        for token in self.special_tokens:
            if not re.fullmatch(r"<[a-z]+>", token) or token in RESERVED_SYMBOLS:
                raise UserError(
                    f"text setting special_tokens contains {token!r}: each token must be a lowercase word in angle "
                    f"brackets such as <url>, other than {', '.join(RESERVED_SYMBOLS)}"
                )
        if len(set(self.special_tokens)) < len(self.special_tokens):
            raise UserError(f"text setting special_tokens = {self.special_tokens}: a token is listed twice")

    @classmethod
    def from_json(cls, values: dict[str, Any], path: Path) -> "TextSettings":
        """Parse settings from a JSON object, which must contain all settings and nothing else.

        Args:
            values: the object.
            path: path of the JSON file, for messages.

        Raises:
            UserError: a setting is missing, unknown or invalid.
        """
        missing = sorted({field.name for field in fields(cls)} - values.keys())
        if missing:
            raise UserError(f"{path}: text setting {', '.join(missing)} is missing; {COPY_AGAIN}")
        return as_type(cls, values, path, COPY_AGAIN)


def symbol_pattern(settings: TextSettings) -> Pattern:
    """Compile a case-insensitive pattern for the special tokens, ``<mask>`` and ``<unk>``.

    The match is a group, which makes ``split`` keep the symbols.
    """
    symbols = "|".join(map(re.escape, (*settings.special_tokens, MASK, UNKNOWN)))
    return re.compile(f"({symbols})", re.IGNORECASE | re.ASCII)  # without re.ASCII, a long s would match an s


class TextNormaliser:
    """A callable that normalizes a text, ideally a single sentence, and can revert Moses' spacing for display.

    Special tokens, ``<mask>`` and ``<unk>`` (in upper or lower case) are not normalized; each becomes a separate
    lowercase word.
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
        """Normalize ``text`` into words and symbols separated by single spaces."""
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
        """Restore normal spacing with Moses' detokenizer, which misplaces some quotation marks."""
        if not self.settings.moses_tokenise:
            return words
        return self._moses_back.detokenize(words.split(), unescape=False)
