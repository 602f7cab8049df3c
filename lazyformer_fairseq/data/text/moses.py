r"""Punctuation normalisation and tokenization of Moses: one table of rules for texts here and for exported tokenizers.

:func:`punctuation_rules` and :func:`word_rules` express the rules of sacremoses (the same in 0.1.1 and 0.2.0, without
escapes) as replacements that the ``tokenizers`` library can apply, in the order of sacremoses; from sacremoses itself
only the lists are used. Three things differ from Python's ``re.sub`` and need another notation:

- A replacement cannot refer to a group. A rule therefore matches its context by lookaround and replaces only what it
  changes; most rules insert a space at a match of zero width. This also keeps the offsets right.
- ``re.sub`` consumes the character after a match: ``k'n'r`` becomes ``k 'n'r``, because the ``n`` is already consumed.
  Here ``\K`` excludes the preceding character from the match, and ``(?!\G)`` prevents a match whose preceding character
  was examined by the previous match.
- An exported tokenizer does not split a text at its symbols (such as ``<mask>``). Their brackets are replaced by
  :data:`SIGNS`, which count as edges of the text.

:class:`MosesWords` gives the same result as the rules, about ten times faster. Nearly all of a text consists of letters
and digits separated by single spaces, which no rule changes. The rules change only what stands *between* two letters,
called a gap, such as ``, "`` or ``'`` or ``.``. They are applied once to each distinct gap, between two words of the
right class, and the result is cached. This is exact because of what the rules examine:

- A rule that looks past a space or a mark examines one letter on either side, and of that letter only its
  :meth:`~MosesWords._class_of`. No match extends over more than one letter, so a letter between two marks, as in
  ``'n'`` or ``U.S.``, belongs to the gap.
- The rule for full stops examines the whole preceding token (whether it is an abbreviation or contains a full stop) and
  the first letter of the next one. Therefore a gap with a full stop is looked up together with the text before it,
  unless this is an ordinary word.

The rules are applied to the whole text if it contains characters that are not printable (control characters, which one
of the rules deletes, and rare spaces), the marker that stands for several full stops, or very long gaps (scripts whose
characters the rules treat as marks, such as Chinese).
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
LONGEST_GAP = 40  # characters of a gap and of the text before it; bounds the memory of the cached answers
LONGEST_SEARCH = 60  # words and gaps, back to the space before a full stop; bounds the time
MARKER_OF_STOPS = "DOTMULTI"  # sacremoses' intermediate form of "..", which it turns into a full stop at the end
NO_BREAK_SPACE = "\u00a0"


def character_class(letters: Iterable[str]) -> str:
    """Return the content of a regular expression's character class for these letters, such as ``a-zA-Z``."""
    ranges: list[list[int]] = []
    for code in sorted(set(map(ord, letters))):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)


# Private-use characters, which are removed from the texts themselves.
OPEN, CLOSE, *WHOLE = (chr(code) for code in range(0x10FF00, 0x10FF05))  # brackets of a symbol, and whole symbols
SIGNS = f"{OPEN}-{WHOLE[-1]}"
MARK = "\U0010ff05"  # marks a place for the next rule
BREAK = "\U0010ff06"  # no symbol and no piece extends over it
NO_SIGN = "\U0010ff07"  # replaces such characters in a text; for private use as well, so that no piece contains it
TAKEN = f"[{SIGNS}{MARK}{BREAK}]"
NOT_SIGN = f"[^{SIGNS}]"
START = f"(?<!{NOT_SIGN})"
END = f"(?!{NOT_SIGN})"
NOT_TAKEN = r"(?:\A|(?!\G))"
WHITESPACE = character_class(character for character in map(chr, range(0x3001)) if character.isspace())
DECIMALS = character_class(character for character in map(chr, range(0x110000)) if character.isdecimal())

# The rules that sacremoses writes with groups, and their equivalents with lookaround. Some rules that match several
# characters would also work unchanged, but would give the offsets of the last character.
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
    ): [],  # a later rule turns every such mark into ' anyway
    ("([a-zA-Z])’([a-zA-Z])", r"\g<1>'\g<2>"): [],
    # The quotation mark is inserted behind the punctuation, then the one in front is deleted.
    (r'"([,.]+)', r'\g<1>"'): [(r'"[,.]+\K', '"'), (r'"(?=[,.])', "")],
    # A mark is set at the end of the match; then the quotation mark is inserted in front and deleted behind.
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
    """Replacement of every match of a pattern, written for both Oniguruma and the package regex, by a fixed text."""

    pattern: str
    content: str


def punctuation_rules(language: str) -> list[Rule]:
    """Return the rules of ``MosesPunctNormalizer(language)``.

    Raises:
        UserError: the installed version of sacremoses has a rule that is not known here.
    """
    rules = []
    for pattern, content in MosesPunctNormalizer(language).substitutions:
        if (pattern, content) in REWRITTEN:
            rules += REWRITTEN[pattern, content]
        elif "\\g<" in content:
            raise UserError(
                f"sacremoses normalises {pattern!r} to {content!r}, a rule that this program does not know: install "
                "sacremoses 0.1.1 or 0.2.0"
            )
        else:
            rules.append((pattern, content))
    return list(itertools.starmap(Rule, rules))


NO_SPACE_AT_EDGES = Rule(f"{START} +| +{END}", "")
WHITESPACE_RULES = [Rule(f"[{WHITESPACE}]+", " "), NO_SPACE_AT_EDGES]


def word_rules(language: str) -> list[Rule]:
    """Return the rules of ``MosesTokenizer(language).tokenize(..., escape=False)``, which may leave repeated spaces."""
    moses = MosesTokenizer(language)
    alphanumeric = character_class(moses.IsAlnum)
    numeric = character_class(MosesTokenizer.IsN)
    special = rf"[^{alphanumeric}{WHITESPACE}.'`,\-{SIGNS}]"
    return [
        Rule(f"[{WHITESPACE}]+", " "),
        Rule(r"[\x00-\x1f]", ""),
        Rule(f"{START} +| +{END}", ""),
        Rule(f"(?={special})|(?<={special})", " "),  # PAD_NOT_ISALNUM
        Rule(rf"(?<!\.)(?=\.\.)|(?<=\.\.)(?!\.)(?={NOT_SIGN})", " "),  # replace_multidots
        Rule(rf"[^{numeric}{SIGNS}]\K,", " , "),  # COMMA_SEPARATE_1, 2, 3
        Rule(rf",(?=[^{numeric}{SIGNS}])", " , "),
        Rule(f"(?<=[{numeric}]),{END}", " , "),
        *_apostrophe_rules(language, numeric),
        *_full_stop_rules(moses),
        Rule(" +", " "),
        Rule(f"{START} +| +{END}", ""),
        Rule(rf"(?=\.'{END})|(?<=\.)(?='{END})", " "),  # TRAILING_DOT_APOSTROPHE
        # restore_multidots, which also replaces its marker where a text contains it
        Rule(r"(?:DOT)+\KMULTI", MARK),
        Rule(f"DOT(?=(?:DOT)*{MARK})", "."),
        Rule(MARK, ""),
    ]


def moses_rules(language: str, normalise_punctuation: bool, tokenise: bool) -> list[Rule]:
    """Return all rules for these settings, in order; the words that they produce are separated by single spaces."""
    rules = []
    if normalise_punctuation:
        rules = punctuation_rules(language)
    return rules + (word_rules(language) if tokenise else []) + WHITESPACE_RULES


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
    """Return the rule of handles_nonbreaking_prefixes.

    It separates a final full stop from its word, unless the word is an abbreviation or the like.
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
    """Error for a text that the fast method does not cover."""


@cache
def moses_words(language: str, normalise_punctuation: bool, tokenise: bool) -> "MosesWords":
    """Return the :class:`MosesWords` for these settings, which all callers in this process share with its cache."""
    return MosesWords(language, normalise_punctuation, tokenise)


class MosesWords:
    """Callable that returns the words of a text, separated by single spaces, without changing their case.

    The result equals that of :meth:`by_rules` on every text.

    Args:
        language: the two-letter language code; the fast method is exact for the rules of every language.
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
        # A single space is not a gap. A letter between two marks belongs to their gap.
        self._gap = re.compile(rf"( ?[^{letters} ][^{letters}]*(?:(?<! )[{letters}](?! )[^{letters}]+)*)")
        abbreviations = (*moses.NONBREAKING_PREFIXES, *moses.NUMERIC_ONLY_PREFIXES)
        self._ends_of_abbreviations = {word for words in abbreviations for word in re.findall(f"[{letters}]+", words)}
        self._words_of_classes: dict[tuple, str] = {}
        self._stand_in = cache(self._find_stand_in)
        self._answer = lru_cache(KEPT_ANSWERS)(self._ask)

    def __reduce__(self) -> tuple:
        return moses_words, self._settings

    def __call__(self, text: str) -> str:
        """Return the words of a text."""
        if MARKER_OF_STOPS in text or not (text.isprintable() or _printable_but_for_no_break_space(text)):
            return self.by_rules(text)
        try:
            return self._by_gaps(text)
        except _UnusualTextError:
            return self.by_rules(text)

    def by_rules(self, text: str) -> str:
        """Return the words of a text by applying all rules to the whole text: the slow reference method."""
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
        """Return the result of the rules for ``gap`` between two words, which are "" at the edges of the text."""
        if len(before) + len(gap) > LONGEST_GAP:
            raise _UnusualTextError  # lru_cache does not keep exceptions, so the cached answers stay small
        answer = self.by_rules(before + gap + after)
        # The rules neither add, delete nor move letters, so the gap starts after the last letter of `before`.
        start = 0
        for _ in self._letter.findall(before):
            letter = self._letter.search(answer, start)
            assert letter is not None, (before, gap, answer)
            start = letter.end()
        return answer[start : len(answer) - len(after)]

    def _before_stop(self, parts: list[str], place: int) -> str:
        """Return the text before the gap ``parts[place]`` on which the treatment of its full stops depends."""
        word = parts[place - 1].rpartition(" ")[2]
        if place == 1 or " " in parts[place - 1] or parts[place - 2][-1] == " ":
            before = token = word
        else:
            before = self._back_to_space(parts, place)
            token = before.rpartition(" ")[2]
        # The rules turn a no-break space between two digits into a full stop or a comma.
        if word in self._ends_of_abbreviations or "." in token or NO_BREAK_SPACE in token:
            return before
        # If the gap has a second full stop, it matters whether the token contains an alphabetic character.
        if token[-1:] in self._alphabetic or self._alphabetic.isdisjoint(token):
            return self._stand_in(token[-1:])
        return before

    @staticmethod
    def _back_to_space(parts: list[str], place: int) -> str:
        """Return the text before ``parts[place]``, from the word before the gap in which the preceding token starts."""
        first = place - 1
        while True:
            first -= 2
            if first == 0 or " " in parts[first] or " " in parts[first + 1]:
                return parts[first].rpartition(" ")[2] + "".join(parts[first + 1 : place])
            if place - first > LONGEST_SEARCH:
                raise _UnusualTextError

    def _find_stand_in(self, letter: str) -> str:
        """Return a word of letters of the same class, always the same per class, that is not an abbreviation."""
        if not letter:
            return ""
        word = self._words_of_classes.setdefault(self._class_of(letter), letter * 3)
        while word in self._ends_of_abbreviations:
            word += letter
        return word

    def _class_of(self, letter: str) -> tuple:
        """Return all properties of a letter that a rule can test; one rule tests for ``s``, as in ``5's``."""
        sets = (self._alphabetic, self._numeric, self._lower)
        return (
            *(letter in each for each in sets),
            letter.isdecimal(),
            letter.isascii(),
            letter == "s",
        )


def _printable_but_for_no_break_space(text: str) -> bool:
    # The rule for "nº" and a no-break space is the only one that examines two letters, and it precedes others.
    return text.replace(NO_BREAK_SPACE, "").isprintable() and f"º{NO_BREAK_SPACE}" not in text
