"""Moses' punctuation normalisation and tokenisation: sacremoses's output, some ten times faster.

Nearly all of a text is letters and digits with single spaces between them, which no rule of Moses changes. The rules
change what stands *between* two letters, a gap: ``, "`` or ``'`` or ``.``. sacremoses answers for each gap once,
between two words of the right kind, and the answer is kept. That is exact because of what its rules (the same in
0.1.1 and 0.2.0) look at:

- A rule that looks past a space or a mark reads one letter on either side, and of that letter only its
  :meth:`~MosesWords._kind_of`. No match reaches over more than one letter; so a letter between two marks, as in
  ``'n'`` or ``U.S.``, belongs to the gap.
- The rule for full stops reads the whole token before (is it an abbreviation? has it a stop inside?) and the first
  letter of the next one. So sacremoses gets a gap with a full stop in it together with what stands before it, unless
  that is a word like any other.

What is not printable (control characters, which one of the rules deletes, and rare spaces), what looks like the marker
that stands for several stops, and very long gaps (writing that the rules know as marks, such as Chinese) go to
sacremoses with the whole text.
"""

import re
from collections.abc import Iterable
from functools import cache, lru_cache

from sacremoses import MosesPunctNormalizer, MosesTokenizer

KEPT_ANSWERS = 1 << 16
LONGEST_GAP = 40  # characters of a gap and what must stand before it; bounds the memory of the kept answers
LONGEST_SEARCH = 60  # words and gaps, back to the space before a full stop; bounds the time
MARKER_OF_STOPS = "DOTMULTI"  # what ".." is for sacremoses meanwhile
NO_BREAK_SPACE = "\u00a0"


class _UnusualText(Exception):
    """The fast way does not cover this text."""


@cache
def moses_words(language: str, normalise_punctuation: bool, tokenise: bool) -> "MosesWords":
    """The one :class:`MosesWords` of these settings; every caller in this process shares its answers and tables."""
    return MosesWords(language, normalise_punctuation, tokenise)


class MosesWords:
    """Callable: text -> its words divided by single spaces, cased; equal to :meth:`by_sacremoses` on every text.

    Args:
        language: two-letter code; the fast way holds for the rules of every language.
        normalise_punctuation: apply MosesPunctNormalizer.
        tokenise: apply MosesTokenizer, without escapes.
    """

    def __init__(self, language: str, normalise_punctuation: bool, tokenise: bool):
        self._settings = (language, normalise_punctuation, tokenise)
        self._punctuation = MosesPunctNormalizer(language) if normalise_punctuation else None
        self._moses = moses = _TokenizerWithTables(language)
        self._tokenises = tokenise
        letters = character_class(letter for letter in moses.IsAlnum if letter.isalnum())
        self._letter = re.compile(f"[{letters}]")
        # One space alone is not a gap. A letter between two marks belongs to theirs.
        self._gap = re.compile(rf"( ?[^{letters} ][^{letters}]*(?:(?<! )[{letters}](?! )[^{letters}]+)*)")
        abbreviations = (*moses.NONBREAKING_PREFIXES, *moses.NUMERIC_ONLY_PREFIXES)
        self._ends_of_abbreviations = {word for words in abbreviations for word in re.findall(f"[{letters}]+", words)}
        self._words_of_kinds: dict[tuple, str] = {}
        self._stand_in = cache(self._find_stand_in)
        self._answer = lru_cache(KEPT_ANSWERS)(self._ask)

    def __reduce__(self):
        return moses_words, self._settings

    def __call__(self, text: str) -> str:
        if MARKER_OF_STOPS in text or not (text.isprintable() or _printable_but_for_no_break_space(text)):
            return self.by_sacremoses(text)
        try:
            return self._by_gaps(text)
        except _UnusualText:
            return self.by_sacremoses(text)

    def by_sacremoses(self, text: str) -> str:
        """The definition, and the slow way: sacremoses on the whole text."""
        if self._punctuation is not None:
            text = self._punctuation.normalize(text)
        if self._tokenises:
            text = self._moses.tokenize(text, escape=False, return_str=True)
        return " ".join(text.split())

    def _by_gaps(self, text: str) -> str:
        if "  " in text:
            text = re.sub("  +", " ", text)
        parts = self._gap.split(text)  # words, gap, words, ..., words
        done = parts.copy()
        answer, stand_in = self._answer, self._stand_in
        for place in range(1, len(parts), 2):
            gap = parts[place]
            before = self._before_stop(parts, place) if "." in gap else stand_in(parts[place - 1][-1:])
            done[place] = answer(before, gap, stand_in(parts[place + 1][:1]))
        return "".join(done).strip()

    def _ask(self, before: str, gap: str, after: str) -> str:
        """What sacremoses makes of ``gap`` between two words ("" where the text starts or ends)."""
        if len(before) + len(gap) > LONGEST_GAP:
            raise _UnusualText  # an exception is not kept, so that the kept answers stay small
        answer = self.by_sacremoses(before + gap + after)
        # Letters are neither added nor lost, nor do they change places: the gap starts after the last one of `before`.
        start = 0
        for _ in self._letter.findall(before):
            start = self._letter.search(answer, start).end()
        return answer[start : len(answer) - len(after)]

    def _before_stop(self, parts: list[str], place: int) -> str:
        """What must stand before the gap ``parts[place]`` for its full stops to be treated as they are here."""
        word = parts[place - 1].rpartition(" ")[2]
        if place == 1 or " " in parts[place - 1] or parts[place - 2][-1] == " ":
            before = token = word
        else:
            before = self._back_to_space(parts, place)
            token = before.rpartition(" ")[2]
        # Between two digits a no-break space becomes a stop (or a comma).
        if word in self._ends_of_abbreviations or "." in token or NO_BREAK_SPACE in token:
            return before
        # With a second stop in the gap it matters whether the token has a letter of the alphabet.
        if token[-1:] in self._moses.alphabetic or not self._moses.isanyalpha(token):
            return self._stand_in(token[-1:])
        return before

    @staticmethod
    def _back_to_space(parts: list[str], place: int) -> str:
        """The text from the word before the gap in which the token before ``parts[place]`` starts."""
        first = place - 1
        while True:
            first -= 2
            if first == 0 or " " in parts[first] or " " in parts[first + 1]:
                return parts[first].rpartition(" ")[2] + "".join(parts[first + 1 : place])
            if place - first > LONGEST_SEARCH:
                raise _UnusualText

    def _find_stand_in(self, letter: str) -> str:
        """A word of letters of the same kind, one for each kind, that is in no list of abbreviations."""
        if not letter:
            return ""
        word = self._words_of_kinds.setdefault(self._kind_of(letter), letter * 3)
        while word in self._ends_of_abbreviations:
            word += letter
        return word

    def _kind_of(self, letter: str) -> tuple:
        """All that a rule can test of a single letter: ``s`` is that of ``5's``."""
        sets = (self._moses.alphabetic, self._moses.numeric, self._moses.lower)
        return *(letter in each for each in sets), letter.isdecimal(), letter.isascii(), letter == "s"


class _TokenizerWithTables(MosesTokenizer):
    """sacremoses makes a set of some thousand letters at every full stop; this makes it once."""

    def __init__(self, language: str):
        super().__init__(language)
        self.alphabetic, self.numeric, self.lower = set(self.IsAlpha), set(self.IsN), set(self.IsLower)

    def islower(self, text: str) -> bool:
        return self.lower.issuperset(text)

    def isanyalpha(self, text: str) -> bool:
        return not self.alphabetic.isdisjoint(text)


def _printable_but_for_no_break_space(text: str) -> bool:
    # The rule for "nº" and a no-break space is the one that reads two letters, and it goes before others.
    return text.replace(NO_BREAK_SPACE, "").isprintable() and f"º{NO_BREAK_SPACE}" not in text


def character_class(letters: Iterable[str]) -> str:
    """The inside of a regular expression's brackets, ``a-zA-Z...``."""
    ranges: list[list[int]] = []
    for code in sorted(set(map(ord, letters))):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)
