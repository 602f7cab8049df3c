"""Moses' rules (sacremoses's, without escapes) as replacements for the ``tokenizers`` library, in sacremoses's order.

Three things differ from Python's ``re.sub``, and are expressed otherwise:

- A replacement holds no group. So a rule matches by lookaround, and replaces only what it changes; most insert a space
  at a place of no width. That keeps offsets right too.
- ``re.sub`` consumes the character after a match: ``k'n'r`` becomes ``k 'n'r``, because the ``n`` is taken. ``\\K``
  drops what stands before from the match; ``(?!\\G)`` forbids that it is the character that the match before looked at.
- A text is divided at its symbols (``<mask>`` and such), and each part treated alone. Here :data:`SIGNS` stand in the
  place of their brackets, and count as edges of the text.
"""

import re
from typing import NamedTuple

from sacremoses import MosesPunctNormalizer, MosesTokenizer

from lazyformer_fairseq.data.text.moses_words import character_class
from lazyformer_fairseq.errors import UserError

# Characters of private use, which normaliser.py takes out of the texts themselves.
OPEN, CLOSE, *WHOLE = (chr(code) for code in range(0x10FF00, 0x10FF05))  # brackets of a symbol, and whole symbols
SIGNS = f"{OPEN}-{WHOLE[-1]}"
MARK = "\U0010ff05"  # a place, between two rules
BREAK = "\U0010ff06"  # no symbol and no piece reaches over it
NOT_SIGN = f"[^{SIGNS}]"
START, END = f"(?<!{NOT_SIGN})", f"(?!{NOT_SIGN})"
NOT_TAKEN = r"(?:\A|(?!\G))"
WHITESPACE = character_class(character for character in map(chr, range(0x3001)) if character.isspace())
DECIMALS = character_class(character for character in map(chr, range(0x110000)) if character.isdecimal())

# What sacremoses writes with groups, in its own words, and the same by lookaround. Others, of several characters, would
# do as they are, but the offsets would be those of the last one.
REWRITTEN = {
    (r"\( ", r"("): [(r"\(\K ", "")],
    ("\u00a0«\u00a0", '"'): [("\u00a0«\\K\u00a0", MARK), (f"\u00a0«(?={MARK})", '"'), (MARK, "")],
    ("«\u00a0", '"'): [("«\\K\u00a0", MARK), (f"«(?={MARK})", '"'), (MARK, "")],
    ("\u00a0»\u00a0", '"'): [("\u00a0»\\K\u00a0", MARK), (f"\u00a0»(?={MARK})", '"'), (MARK, "")],
    ("nº\u00a0", "nº "): [("nº\\K\u00a0", " ")],
    ("\u00a0ºC", " ºC"): [("\u00a0(?=ºC)", " ")],
    ("\u00a0cm", " cm"): [("\u00a0(?=cm)", " ")],
    (",\u00a0", ", "): [(",\\K\u00a0", " ")],
    (r"\) ([.!:?;,])", r")\g<1>"): [(r"\)\K (?=[.!:?;,])", "")],
    (r"(\d) %", r"\g<1>%"): [(rf"(?<=[{DECIMALS}]) (?=%)", "")],
    ("([a-zA-Z])‘([a-zA-Z])", r"\g<1>'\g<2>"): [],  # all others become ' as well, a rule later
    ("([a-zA-Z])’([a-zA-Z])", r"\g<1>'\g<2>"): [],
    # The quote is written behind, then the one in front deleted.
    (r'"([,.]+)', r'\g<1>"'): [(r'"[,.]+\K', '"'), (r'"(?=[,.])', "")],
    # What the rule consumes ends at a mark; then the quote is written in front, and deleted behind.
    (r'(\.+)"(\s*[^<])', r'"\g<1>\g<2>'): [
        (rf'\.+"[{WHITESPACE}]*[^<{SIGNS}]\K', MARK),
        (rf'(?<!\.)\.(?=\.*"[{WHITESPACE}]*[^<{SIGNS}]{MARK})', '".'),
        (rf'\.\K"(?=[{WHITESPACE}]*[^<{SIGNS}]{MARK})', ""),
        (MARK, ""),
    ],
    ("(\\d)\u00a0(\\d)", r"\g<1>,\g<2>"): [
        (rf"{NOT_TAKEN}[{DECIMALS}]\K\u00a0(?=[{DECIMALS}])", ","),
    ],
    ("(\\d)\u00a0(\\d)", r"\g<1>.\g<2>"): [
        (rf"{NOT_TAKEN}[{DECIMALS}]\K\u00a0(?=[{DECIMALS}])", "."),
    ],
}


class Rule(NamedTuple):
    """Every match of an Oniguruma pattern becomes the content."""

    pattern: str
    content: str


def punctuation_rules(language: str) -> list[Rule]:
    """MosesPunctNormalizer(language).

    Raises:
        UserError: this version of sacremoses has a rule that is not known here.
    """
    rules = []
    for pattern, content in MosesPunctNormalizer(language).substitutions:
        if (pattern, content) in REWRITTEN:
            rules += REWRITTEN[pattern, content]
        elif "\\g<" in content:
            raise UserError(
                f"sacremoses normalises {pattern!r} to {content!r}, a rule of another version than those that can be "
                "exported: install sacremoses 0.1.1 or 0.2.0"
            )
        else:
            rules.append((pattern, content))
    return [Rule(*rule) for rule in rules]


def whitespace_rules() -> list[Rule]:
    """Single spaces, and none at the edges."""
    return [Rule(f"[{WHITESPACE}]+", " "), Rule(f"{START} +| +{END}", "")]


def word_rules(language: str) -> list[Rule]:
    """MosesTokenizer(language).tokenize(..., escape=False), spaces inside not yet made single."""
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
        # restore_multidots, which finds its own marker in texts, too
        Rule(r"(?:DOT)+\KMULTI", MARK),
        Rule(f"DOT(?=(?:DOT)*{MARK})", "."),
        Rule(MARK, ""),
    ]


def _apostrophe_rules(language: str, numeric: str) -> list[Rule]:
    letters = character_class(MosesTokenizer.IsAlpha)
    letter, other = f"[{letters}]", f"[^{letters}{SIGNS}]"
    if language == "en":
        rules = [
            (other, other, " ' "),
            (f"[^{letters}{numeric}{SIGNS}]", letter, " ' "),
            (letter, other, " ' "),
            (letter, letter, " '"),
            (f"[{numeric}]", "s", " '"),
        ]
    elif language in ("fr", "it"):
        rules = [(other, other, " ' "), (other, letter, " ' "), (letter, other, " ' "), (letter, letter, "' ")]
    else:
        return [Rule("'", " ' ")]
    return [Rule(rf"{NOT_TAKEN}{before}\K'(?={after})", content) for before, after, content in rules]


def _full_stop_rules(moses: MosesTokenizer) -> list[Rule]:
    """handles_nonbreaking_prefixes: a word's last stop stands alone, unless the word is an abbreviation or the like."""
    inside = f"[^ {SIGNS}]"
    end = f"(?!{inside})"
    letters, lower = character_class(moses.IsAlpha), character_class(MosesTokenizer.IsLower)
    numeric_only = set(moses.NUMERIC_ONLY_PREFIXES)
    stays = [
        rf"(?={inside}*\.{inside}){inside}*[{letters}]",
        rf"(?:{_alternatives(set(moses.NONBREAKING_PREFIXES) - numeric_only)})\.{end}",
        rf"{inside}+ +[{lower}]",
        rf"(?:{_alternatives(numeric_only)})\. +[0-9]",
    ]
    return [Rule(rf"(?<!{inside})(?!{'|'.join(stays)}){inside}*[^ .{SIGNS}]\K\.{end}", " .")]


def _alternatives(words: set[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words)) or "(?!)"
