"""Raw text -> the words that BPE sees: punctuation, case, Moses tokens, special tokens.

LazyFormer's appendix A: normalise, lower-case, tokenise (Moses); BPE follows in ``tokenizer.py``. Here Moses sees the
text cased: its rules for full stops read the case of what follows, and in lower-cased text of several sentences (a GLUE
pair, say) would leave the stops inside on their words, as pre-training on single sentences never does.
"""

import re
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from re import Pattern
from typing import Any, ClassVar, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.checked import as_type

MASK = "<mask>"
UNKNOWN = "<unk>"
# Of every dictionary of fairseq's, with the ids 0 to 3.
FIRST_SYMBOLS = (
    "<s>",
    "<pad>",
    "</s>",
    UNKNOWN,
)
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


Span = tuple[int, int]  # the first character, and one past the last


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

    def with_places(self, text: str) -> tuple[str, list[Span]]:
        """Return what calling this returns, and for each of its characters the span of `text` that it came from."""
        words: list[str] = []
        places: list[Span] = []
        start = 0
        for number, part in enumerate(self._symbol.split(text)):
            if number % 2:
                made = part.lower()
            else:
                made = self._normalise_plain(part)
            if made:
                if words:
                    places.append((start, start))
                words.append(made)
                if number % 2:
                    found = [(at, at + 1) for at in range(len(part))]
                else:
                    found = places_of(made, part)
                places += [(start + first, start + last) for first, last in found]
            start += len(part)
        return " ".join(words), places

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


# Where in a raw text the characters of its words stand. Moses' rules insert and delete spaces, and change few
# characters: quotes, dashes, ellipses. Both texts are written alike (`_units`), and then nearly always equal but for
# spaces. Where they differ, characters have changed places (a quote and the comma behind it), have gone (control
# characters), or have come (a stop for the space in ``1 000``).

ALIKE = str.maketrans(
    {
        **dict.fromkeys('„“”«»"', "''"),
        **dict.fromkeys("´‘‚’`", "'"),
        **dict.fromkeys("–—", "-"),
        "…": "...",
        "ς": "σ",
        **dict.fromkeys(map(chr, range(0x20)), ""),
    }
)
LONGEST_CHANGE = 40  # units that change places, come or go at once
TELLING = 3  # units that must agree behind a change


def places_of(words: str, text: str) -> list[Span]:
    """Return the span in the raw text of each character of its normalised words; a space has what is between words.

    Args:
        text: raw text.
        words: what a normaliser made of `text`, without symbols such as ``<mask>``.
    """
    raw, raw_places = _units(text)
    normal, word_places = _units(words)
    matched: list[Optional[int]] = list(range(len(raw)))
    if raw != normal:
        matched = _match(raw, normal)
    starts = [len(text)] * len(words)
    ends = [0] * len(words)
    for place, unit in zip(word_places, matched, strict=True):
        if unit is not None:
            starts[place] = min(starts[place], raw_places[unit])
            ends[place] = max(ends[place], raw_places[unit] + 1)
    return _filled(starts, ends, len(text))


def cover(spans: list[Span]) -> Optional[Span]:
    """Return the span from the first character of spans to the last one; None where there is none."""
    filled = [span for span in spans if span[0] < span[1]]
    if filled:
        return (min(filled)[0], max(last for _, last in filled))
    return None


def _units(text: str) -> tuple[str, list[int]]:
    """Return the text written as when normalised, without spaces, and the place of each unit's character."""
    units = list(map(_written, text))
    written = "".join(units)
    return written, [place for place, unit in enumerate(units) for _ in unit]


@lru_cache(maxsize=1 << 14)  # characters of many scripts
def _written(character: str) -> str:
    """One character's units; none for a space."""
    if character.isspace():
        return ""
    return character.translate(ALIKE).lower().translate(ALIKE)


def _match(raw: str, normal: str) -> list[Optional[int]]:
    """Return, for each unit of `normal`, the unit of `raw` that it came from, or None."""
    matched: list[Optional[int]] = []
    at = 0
    while len(matched) < len(normal):
        here = len(matched)
        if raw[at : at + 1] == normal[here]:
            matched.append(at)
            at += 1
        elif length := _length_of_swap(raw, normal, at, here):
            free = list(range(at, at + length))
            for unit in normal[here : here + length]:
                found = next(place for place in free if raw[place] == unit)
                free.remove(found)
                matched.append(found)
            at += length
        else:
            gone, come = _change(raw, normal, at, here)
            same = min(gone, come)
            matched += [*range(at, at + same), *[None] * (come - same)]
            at += gone
    return matched


def _length_of_swap(raw: str, normal: str, at: int, here: int) -> int:
    """Return how many units have only changed their order, quotes and the marks beside them; 0 for none."""
    for length in range(2, LONGEST_CHANGE):
        last = raw[at + length - 1 : at + length]
        if not last or last not in "',.":
            return 0
        if sorted(raw[at : at + length]) == sorted(normal[here : here + length]):
            return length
    return 0


def _change(raw: str, normal: str, at: int, here: int) -> tuple[int, int]:
    """Return the fewest units of raw that have gone and of normal that have come, so that both agree behind them."""
    for total in range(1, LONGEST_CHANGE):
        for gone, come in zip(range(total + 1), range(total, -1, -1), strict=True):
            if raw[at + gone : at + gone + TELLING] == normal[here + come : here + come + TELLING]:
                return gone, come
    return 1, 1


def _filled(starts: list[int], ends: list[int], length: int) -> list[Span]:
    """Spans; what came from nothing has what stands between its neighbours, such as the space in a number."""
    followers = [length] * len(starts)
    follower = length
    for place in range(len(starts) - 1, -1, -1):
        followers[place] = follower
        if starts[place] < ends[place]:
            follower = starts[place]
    spans: list[Span] = []
    end = 0
    for start, stop, follower in zip(starts, ends, followers, strict=True):
        if start < stop:
            found = (start, stop)
        else:
            found = (end, max(end, follower))
        spans.append(found)
        if start < stop:
            end = found[1]
    return spans
