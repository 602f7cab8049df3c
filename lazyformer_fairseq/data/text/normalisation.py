"""Normalisation of raw text into the words that BPE reads: punctuation, case, Moses tokens, special tokens.

LazyFormer's appendix A normalises, lower-cases and tokenises (Moses) the text; BPE follows in ``tokenizer.py``. Here
Moses runs before the text is lower-cased, because its rules for full stops read the case of the next word. In
lower-cased text of several sentences (a GLUE pair, say) they would leave inner full stops attached to their words,
which never happens in pre-training on single sentences.
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from re import Pattern
from typing import Any, ClassVar

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.checked import as_type

SPACE = "\u2581"  # how sentencepiece writes a space
MASK = "<mask>"
UNKNOWN = "<unk>"
# Every fairseq dictionary starts with these symbols; their ids are 0 to 3.
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
    """Settings that, with the sentencepiece model, determine the ids of a text.

    Raises:
        UserError: a value is invalid.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    lower_case: bool = True
    """Lower-case the words (the paper's models are uncased)."""

    normalise_punctuation: bool = True
    """Apply Moses' punctuation normalisation, which turns curly quotes, dashes, ellipses and the like into ASCII."""

    moses_tokenise: bool = True
    """Separate words from punctuation with Moses' rules, but without its XML escapes: ``<`` stays ``<``."""

    language: str = "en"
    """Two-letter language code; Moses' rules and abbreviations depend on it."""

    special_tokens: tuple[str, ...] = ("<url>", "<email>", "<file>")
    """Placeholders that corpus cleaning leaves in the text: lower-case ASCII words in angle brackets, one id each."""

    character_coverage: float = 0.9999
    """Share of the characters in the training text that the vocabulary covers; the rarest ones become ``<unk>``."""

    byte_fallback: bool = False
    """Encode characters without a piece as UTF-8 bytes (256 pieces of the vocabulary) instead of as ``<unk>``.

    This is off because English hardly needs it: in 9 million words of Wikipedia and novels such characters make up
    0.04% of the tokens, mostly in names in other scripts, while 120 letters and signs have a piece. Bytes would cost
    three tokens per such character, and 256 pieces that a model of this text seldom sees. Turn it on for text in many
    scripts.
    """

    def __post_init__(self) -> None:
        if self.language != "en":
            # Importing this takes half a second, which English is spared.
            from lazyformer_fairseq.data.text.moses import KNOWN_LANGUAGES

            if self.language not in KNOWN_LANGUAGES:
                known = ", ".join(sorted(KNOWN_LANGUAGES))
                raise UserError(f"text setting language = {self.language!r}: must be a language of Moses ({known})")
        if not 0 < self.character_coverage <= 1:
            raise UserError(f"text setting character_coverage = {self.character_coverage}: must be in (0, 1]")
        for token in self.special_tokens:
            if not re.fullmatch(r"<[a-z]+>", token) or token in RESERVED_SYMBOLS:
                raise UserError(
                    f"text setting special_tokens holds {token!r}: each must be a lower-case word in angle brackets "
                    f"such as <url>, and none of {', '.join(RESERVED_SYMBOLS)}"
                )
        if len(set(self.special_tokens)) < len(self.special_tokens):
            raise UserError(f"text setting special_tokens = {self.special_tokens}: a token is listed twice")

    @classmethod
    def from_json(cls, values: dict[str, Any], path: Path) -> "TextSettings":
        """Build settings from a JSON object, which must contain every setting and nothing else.

        Args:
            values: the object.
            path: the JSON file, named in errors.

        Raises:
            UserError: a setting is missing, unknown or invalid.
        """
        missing = sorted({field.name for field in fields(cls)} - values.keys())
        if missing:
            raise UserError(f"{path}: text setting {', '.join(missing)} is missing; {COPY_AGAIN}")
        return as_type(cls, values, path, COPY_AGAIN)


def symbol_pattern(settings: TextSettings) -> Pattern:
    """Return a pattern that matches the special tokens, ``<mask>`` and ``<unk>`` in upper or lower case.

    The match is one group, so that ``split`` keeps the symbols.
    """
    symbols = "|".join(map(re.escape, (*settings.special_tokens, MASK, UNKNOWN)))
    return re.compile(f"({symbols})", re.IGNORECASE | re.ASCII)  # else a long s would match in <mask>


class TextNormaliser:
    """Callable that normalises one text at a time, ideally a sentence; it can also undo Moses' spacing for readers.

    The special tokens, ``<mask>`` and ``<unk>``, in upper or lower case, are not normalised: each becomes a word of its
    own, in lower case.
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
        """Return the words and symbols of ``text``, separated by single spaces."""
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
        """Restore ordinary spacing with Moses' detokenizer, which does not place every quotation mark correctly."""
        if not self.settings.moses_tokenise:
            return words
        return self._moses_back.detokenize(words.split(), unescape=False)
