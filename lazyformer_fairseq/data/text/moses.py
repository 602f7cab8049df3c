r"""Moses' punctuation normalization and tokenization as one table of rules, also used in exported tokenizers.

:func:`punctuation_rules` and :func:`word_rules` express the rules of sacremoses (identical in 0.1.1 and 0.2.0, without
escapes) as replacements that the ``tokenizers`` library can apply, in the same order. Only the lists are taken from
sacremoses. The rules need a different notation for three reasons:

- In the library, a replacement cannot refer to a group. Rules therefore match their context by lookaround and replace
  only the part that changes; most of them insert a space at a zero-width match. This also keeps the offsets correct.
- In sacremoses, ``re.sub`` consumes the character after a match: ``k'n'r`` becomes ``k 'n'r``, because the ``n`` is
  already consumed. Here ``\K`` excludes the preceding character from the match, and ``(?!\G)`` prevents a match if its
  preceding character was examined by the previous match.
- An exported tokenizer does not split a text at its symbols (such as ``<mask>``). Their brackets are replaced with
  :data:`SIGNS`, which count as text boundaries.

:class:`MosesWords` is about ten times faster than applying these rules to a text, and produces the same result. Most of
a text consists of letters and digits separated by single spaces, which no rule changes. The rules only change the
characters *between* two letters, called a gap, such as ``, "`` or ``'`` or ``.``. They are applied once to each
distinct gap, placed between two words of the same classes as in the text, and the result is cached. This is exact for
two reasons:

- A rule that looks past a space or a mark examines one letter on either side, and only its
  :meth:`~MosesWords._class_of`. No match extends over more than one letter, so a letter between two marks, as in
  ``'n'`` or ``U.S.``, belongs to the gap.
- The rule for periods examines the whole preceding token (whether it is an abbreviation or contains a period) and the
  first letter of the next one. Therefore a gap with a period is looked up together with the preceding text, unless that
  text is an ordinary word.

The rules are applied to the whole text if it contains nonprintable characters (control characters, which one of the
rules deletes, and rare spaces), the marker for several periods, or very long gaps (as in scripts such as Chinese,
whose characters the rules treat as marks).
"""

import itertools
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import NamedTuple

import regex
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from sacremoses.corpus import NonbreakingPrefixes

from lazyformer_fairseq.errors import UserError

KNOWN_LANGUAGES = frozenset(NonbreakingPrefixes().available_langs.values())
KEPT_ANSWERS = 1 << 16
LONGEST_GAP = 40  # maximum number of characters in a gap and the text before it; bounds the memory of the cache
LONGEST_SEARCH = 60  # maximum number of words and gaps to search back from a period for a space; bounds the time
MARKER_OF_STOPS = "DOTMULTI"  # sacremoses' intermediate form of "..", which it converts to a period at the end
NO_BREAK_SPACE = "\u00a0"


def character_class(letters: Iterable[str]) -> str:
    """Return the ranges of a regular expression's character class for these letters, such as ``a-zA-Z``."""
    ranges: list[list[int]] = []
    for code in sorted(set(map(ord, letters))):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)


# Private-use characters. If an input text contains them, they are replaced with NO_SIGN.
OPEN, CLOSE, *WHOLE = (chr(code) for code in range(0x10FF00, 0x10FF05))  # brackets of a symbol, and whole symbols
SIGNS = f"{OPEN}-{WHOLE[-1]}"
MARK = "\U0010ff05"  # marks a position for the next rule
BREAK = "\U0010ff06"  # separates symbols and pieces
NO_SIGN = "\U0010ff07"  # replaces these characters in input texts; no piece contains it
TAKEN = f"[{SIGNS}{MARK}{BREAK}]"
NOT_SIGN = f"[^{SIGNS}]"
START = f"(?<!{NOT_SIGN})"
END = f"(?!{NOT_SIGN})"
NOT_TAKEN = r"(?:\A|(?!\G))"
WHITESPACE = character_class(character for character in map(chr, range(0x3001)) if character.isspace())
DECIMALS = character_class(character for character in map(chr, range(0x110000)) if character.isdecimal())

# Sacremoses' rules with groups and their equivalents with lookaround. Some rules that match several characters would
# also work unchanged, but would produce the offsets of the last character.
REWRITTEN = {
    (r"\( ", r"("): [(r"\(\K ", "")],
    ("\u00a0«\u00a0", '"'): [
        ("\u00a0«\\K\u00a0", MARK),
        (f"\u00a0«(?={MARK})", '"'),
        (MARK, ""),
    ],
    ("«\u00a0", '"'): [("«\\K\u00a0", MARK), (f"«(?={MARK})", '"'), (MARK, "")],
    ("\u00a0»\u00a0", '"'): [
        ("\u00a0»\\K\u00a0", MARK),
        (f"\u00a0»(?={MARK})", '"'),
        (MARK, ""),
    ],
    ("nº\u00a0", "nº "): [("nº\\K\u00a0", " ")],
    ("\u00a0ºC", " ºC"): [("\u00a0(?=ºC)", " ")],
    ("\u00a0cm", " cm"): [("\u00a0(?=cm)", " ")],
    (",\u00a0", ", "): [(",\\K\u00a0", " ")],
    (r"\) ([.!:?;,])", r")\g<1>"): [(r"\)\K (?=[.!:?;,])", "")],
    (r"(\d) %", r"\g<1>%"): [(rf"(?<=[{DECIMALS}]) (?=%)", "")],
    (
        "([a-zA-Z])‘([a-zA-Z])",
        r"\g<1>'\g<2>",
    ): [],  # a later rule replaces all of these marks with '
    ("([a-zA-Z])’([a-zA-Z])", r"\g<1>'\g<2>"): [],
    # The quotation mark is inserted after the punctuation, then the one before it is deleted.
    (r'"([,.]+)', r'\g<1>"'): [(r'"[,.]+\K', '"'), (r'"(?=[,.])', "")],
    # A mark is set at the end of the match; then the quotation mark is inserted before the periods and deleted after.
    (r'(\.+)"(\s*[^<])', r'"\g<1>\g<2>'): [
        (rf'\.+"[{WHITESPACE}]*[^<{SIGNS}]\K', MARK),
        (rf'(?<!\.)\.(?=\.*"[{WHITESPACE}]*[^<{SIGNS}]{MARK})', '".'),
        (rf'\.\K"(?=[{WHITESPACE}]*[^<{SIGNS}]{MARK})', ""),
        (MARK, ""),
    ],
    ("(\\d)\u00a0(\\d)", r"\g<1>,\g<2>"): [(rf"{NOT_TAKEN}[{DECIMALS}]\K\u00a0(?=[{DECIMALS}])", ",")],
    ("(\\d)\u00a0(\\d)", r"\g<1>.\g<2>"): [(rf"{NOT_TAKEN}[{DECIMALS}]\K\u00a0(?=[{DECIMALS}])", ".")],
}


class Rule(NamedTuple):
    """A replacement rule: a pattern for Oniguruma and the package regex, and the text that replaces its matches."""

    pattern: str
    content: str


def punctuation_rules(language: str) -> list[Rule]:
    """Return the rules of ``MosesPunctNormalizer(language)``.

    Raises:
        UserError: the installed version of sacremoses has an unsupported rule.
    """
    rules = []
    for pattern, content in MosesPunctNormalizer(language).substitutions:
        if (pattern, content) in REWRITTEN:
            rules += REWRITTEN[pattern, content]
        elif "\\g<" in content:
            raise UserError(
                f"the installed sacremoses has an unsupported rule that replaces {pattern!r} with {content!r}; install "
                "sacremoses 0.1.1 or 0.2.0"
            )
        else:
            rules.append((pattern, content))
    return list(itertools.starmap(Rule, rules))


SINGLE_SPACES = Rule(f"[{WHITESPACE}]+", " ")
NO_SPACE_AT_EDGES = Rule(f"{START} +| +{END}", "")
WHITESPACE_RULES = [SINGLE_SPACES, NO_SPACE_AT_EDGES]


def word_rules(language: str) -> list[Rule]:
    """Return the rules of ``MosesTokenizer(language).tokenize(..., escape=False)``.

    Their output may contain repeated spaces.
    """
    moses = MosesTokenizer(language)
    alphanumeric = character_class(moses.IsAlnum)
    numeric = character_class(MosesTokenizer.IsN)
    special = rf"[^{alphanumeric}{WHITESPACE}.'`,\-{SIGNS}]"
    return [
        SINGLE_SPACES,
        Rule(r"[\x00-\x1f]", ""),
        NO_SPACE_AT_EDGES,
        Rule(f"(?={special})|(?<={special})", " "),  # PAD_NOT_ISALNUM
        Rule(rf"(?<!\.)(?=\.\.)|(?<=\.\.)(?!\.)(?={NOT_SIGN})", " "),  # replace_multidots
        Rule(rf"[^{numeric}{SIGNS}]\K,", " , "),  # COMMA_SEPARATE_1, 2, 3
        Rule(rf",(?=[^{numeric}{SIGNS}])", " , "),
        Rule(f"(?<=[{numeric}]),{END}", " , "),
        *_apostrophe_rules(language, numeric),
        *_full_stop_rules(moses),
        Rule(" +", " "),
        NO_SPACE_AT_EDGES,
        Rule(rf"(?=\.'{END})|(?<=\.)(?='{END})", " "),  # TRAILING_DOT_APOSTROPHE
        # restore_multidots, which also replaces occurrences of its marker in the input text
        Rule(r"(?:DOT)+\KMULTI", MARK),
        Rule(f"DOT(?=(?:DOT)*{MARK})", "."),
        Rule(MARK, ""),
    ]


def moses_rules(language: str, normalise_punctuation: bool, tokenise: bool) -> list[Rule]:
    """Return all rules for these settings, in order; they produce words separated by single spaces."""
    rules: list[Rule] = []
    if normalise_punctuation:
        rules += punctuation_rules(language)
    if tokenise:
        rules += word_rules(language)
    return rules + WHITESPACE_RULES


def _apostrophe_rules(language: str, numeric: str) -> list[Rule]:
    letters = character_class(MosesTokenizer.IsAlpha)
    letter = f"[{letters}]"
    other = f"[^{letters}{SIGNS}]"
    if language == "en":
        rules = [
            (other, other, " ' "),
            (f"[^{letters}{numeric}{SIGNS}]", letter, " ' "),
            (letter, other, " ' "),
            (letter, letter, " '"),
            (f"[{numeric}]", "s", " '"),
        ]
    elif language in ("fr", "it"):
        rules = [
            (other, other, " ' "),
            (other, letter, " ' "),
            (letter, other, " ' "),
            (letter, letter, "' "),
        ]
    else:
        return [Rule("'", " ' ")]
    return [Rule(rf"{NOT_TAKEN}{before}\K'(?={after})", content) for before, after, content in rules]


def _full_stop_rules(moses: MosesTokenizer) -> list[Rule]:
    """Return the rule that corresponds to sacremoses' ``handles_nonbreaking_prefixes``.

    It separates a final period from its word, except after abbreviations and in similar cases.
    """
    inside = f"[^ {SIGNS}]"
    end = f"(?!{inside})"
    letters = character_class(moses.IsAlpha)
    lower = character_class(MosesTokenizer.IsLower)
    numeric_only = set(moses.NUMERIC_ONLY_PREFIXES)
    stays = [
        rf"(?={inside}*\.{inside}){inside}*[{letters}]",
        rf"(?:{_alternatives(set(moses.NONBREAKING_PREFIXES) - numeric_only)})\.{end}",
        rf"{inside}+ +[{lower}]",
        rf"(?:{_alternatives(numeric_only)})\. +[0-9]",
    ]
    return [
        Rule(
            rf"(?<!{inside})(?!{'|'.join(stays)}){inside}*[^ .{SIGNS}]\K\.{end}",
            " .",
        )
    ]


def _alternatives(words: set[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words)) or "(?!)"


class _UnusualTextError(Exception):
    """An error raised for texts that the fast method does not support."""


@cache
def moses_words(language: str, normalise_punctuation: bool, tokenise: bool) -> "MosesWords":
    """Return the :class:`MosesWords` for these settings, with a cache shared by all callers in the process."""
    return MosesWords(language, normalise_punctuation, tokenise)


class MosesWords:
    """A callable that splits a text into words separated by single spaces, preserving case.

    The result equals :meth:`by_rules` for every text.

    Args:
        language: two-letter language code; the fast method is exact for every language's rules.
        normalise_punctuation: whether to apply MosesPunctNormalizer.
        tokenise: whether to apply MosesTokenizer, without escapes.
    """

    def __init__(self, language: str, normalise_punctuation: bool, tokenise: bool):
        self._settings = (language, normalise_punctuation, tokenise)
        rules = moses_rules(language, normalise_punctuation, tokenise)
        self._rules = [(regex.compile(pattern), content) for pattern, content in rules]
        moses = MosesTokenizer(language)
        self._alphabetic = set(moses.IsAlpha)
        self._numeric = set(moses.IsN)
        self._lower = set(moses.IsLower)
        letters = character_class(letter for letter in moses.IsAlnum if letter.isalnum())
        self._letter = re.compile(f"[{letters}]")
        # A single space is not a gap, and a letter between two marks is part of their gap.
        self._gap = re.compile(rf"( ?[^{letters} ][^{letters}]*(?:(?<! )[{letters}](?! )[^{letters}]+)*)")
        abbreviations = (*moses.NONBREAKING_PREFIXES, *moses.NUMERIC_ONLY_PREFIXES)
        self._ends_of_abbreviations = {word for words in abbreviations for word in re.findall(f"[{letters}]+", words)}
        self._words_of_classes: dict[tuple, str] = {}
        self._stand_in = cache(self._find_stand_in)
        self._answer = lru_cache(KEPT_ANSWERS)(self._ask)

    def __reduce__(self) -> tuple:
        return moses_words, self._settings

    def __call__(self, text: str) -> str:
        """Split a text into words, using the fast method if possible."""
        is_printable = text.isprintable() or _printable_but_for_no_break_space(text)
        if MARKER_OF_STOPS in text or not is_printable:
            return self.by_rules(text)
        try:
            return self._by_gaps(text)
        except _UnusualTextError:
            return self.by_rules(text)

    def by_rules(self, text: str) -> str:
        """Split a text into words by applying all rules to the whole text; this is the slow reference method."""
        if max(text, default="") >= OPEN:
            text = re.sub(TAKEN, NO_SIGN, text)
        for pattern, content in self._rules:
            text = pattern.sub(content, text)
        return text

    def _by_gaps(self, text: str) -> str:
        if "  " in text:
            text = re.sub("  +", " ", text)
        parts = self._gap.split(text)  # words, gap, words, ..., words
        done = parts.copy()
        answer = self._answer
        stand_in = self._stand_in
        for place in range(1, len(parts), 2):
            gap = parts[place]
            if "." in gap:
                before = self._before_stop(parts, place)
            else:
                before = stand_in(parts[place - 1][-1:])
            done[place] = answer(before, gap, stand_in(parts[place + 1][:1]))
        return "".join(done).strip()

    def _ask(self, before: str, gap: str, after: str) -> str:
        """Apply the rules to ``gap`` between two words, which are "" at the text boundaries."""
        if len(before) + len(gap) > LONGEST_GAP:
            raise _UnusualTextError  # lru_cache does not cache exceptions, which bounds the size of its entries
        answer = self.by_rules(before + gap + after)
        # The rules do not add, delete or move letters, so the gap starts after the last letter of `before`.
        start = 0
        for _ in self._letter.findall(before):
            letter = self._letter.search(answer, start)
            assert letter is not None, (before, gap, answer)
            start = letter.end()
        return answer[start : len(answer) - len(after)]

    def _before_stop(self, parts: list[str], place: int) -> str:
        """Return the context before the gap ``parts[place]`` that determines how its periods are handled."""
        words = parts[place - 1]
        word = words.rpartition(" ")[2]
        if place == 1 or " " in words or parts[place - 2][-1] == " ":
            before = token = word
        else:
            before = self._back_to_space(parts, place)
            token = before.rpartition(" ")[2]
        # The rules replace a no-break space between two digits with a period or a comma.
        if word in self._ends_of_abbreviations or "." in token or NO_BREAK_SPACE in token:
            return before
        # If the gap has a second period, the result depends on whether the token contains an alphabetic character.
        if token[-1:] in self._alphabetic or self._alphabetic.isdisjoint(token):
            return self._stand_in(token[-1:])
        return before

    @staticmethod
    def _back_to_space(parts: list[str], place: int) -> str:
        """Return the text before ``parts[place]`` back to the last word before the preceding token."""
        first = place - 1
        while True:
            first -= 2
            if first == 0 or " " in parts[first] or " " in parts[first + 1]:
                last_word = parts[first].rpartition(" ")[2]
                return last_word + "".join(parts[first + 1 : place])
            if place - first > LONGEST_SEARCH:
                raise _UnusualTextError

    def _find_stand_in(self, letter: str) -> str:
        """Return a word that stands in for all words of the letter's class and is not an abbreviation."""
        if not letter:
            return ""
        word = self._words_of_classes.setdefault(self._class_of(letter), letter * 3)
        while word in self._ends_of_abbreviations:
            word += letter
        return word

    def _class_of(self, letter: str) -> tuple:
        """Return all properties of a letter that rules depend on, including whether it is an ``s``, as in ``5's``."""
        sets = (self._alphabetic, self._numeric, self._lower)
        return (
            *(letter in each for each in sets),
            letter.isdecimal(),
            letter.isascii(),
            letter == "s",
        )


def _printable_but_for_no_break_space(text: str) -> bool:
    # Only the rule for "nº" and a no-break space examines two letters, and it is applied before others.
    return text.replace(NO_BREAK_SPACE, "").isprintable() and f"º{NO_BREAK_SPACE}" not in text
