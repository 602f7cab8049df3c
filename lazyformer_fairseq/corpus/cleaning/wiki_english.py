"""The facts that :mod:`wiki_markup` needs of one language's Wikipedia: here English. Other languages: one file each."""

import re
from collections.abc import Callable
from typing import Union

# Links into these show a picture, or only sort the page; the text between the brackets is not part of the sentence.
LEFT_OUT_NAMESPACES = frozenset("file image media category".split())

DISAMBIGUATION_TEMPLATE = re.compile(
    r"\{\{\s*(?:[\w -]*disambig(?:uation)?|dab|hndis|geodis|mil-?unit-?dis|schooldis|numberdis)"
    r"\s*(?:\||\}\})",
    re.IGNORECASE,
)
DISAMBIGUATION_TITLE = "(disambiguation)"
DISAMBIGUATION_OPENING = re.compile(
    r"[^\n]{,200}\b(?:may|can|could|might) (?:also |either )*refer to(?: the following)?:"
)

FORMULA = "formula"  # stands for a formula, so that its sentence stays whole

Arguments = list[str]  # those without a name, in order
Text = Union[str, Callable[[Arguments], str]]  # with {} for the first argument, or a function of all


def _second(arguments: Arguments) -> str:
    return arguments[min(1, len(arguments) - 1)] if arguments else ""


BETWEEN_NUMBERS = frozenset(("to", "and", "or", "by", "x", "×", "-", "–", "to(-)", "+/-"))


def _measure(arguments: Arguments) -> str:
    """{{convert|5|km|mi}}, {{convert|5|to|10|km}}: the first unit alone."""
    words = arguments[:2]
    while len(arguments) >= len(words) + 2 and words[-1] in BETWEEN_NUMBERS:
        words = arguments[: len(words) + 2]
    return " ".join(words).replace(" - ", "–").replace(" – ", "–")


def _fraction(arguments: Arguments) -> str:
    """{{frac|2}}, {{frac|1|2}}, {{frac|3|1|2}}."""
    whole, parts = (arguments[:1], arguments[1:]) if len(arguments) == 3 else ([], arguments)
    return " ".join([*whole, "/".join(parts if len(parts) != 1 else ["1", *parts])])


# Templates whose text is part of a sentence, by their names in lower case; all others are dropped.
INLINE_TEMPLATES: dict[str, Text] = {
    **dict.fromkeys(
        "nowrap nobr nbr small smaller big larger em strong angbr vanchor sc sc2 smallcaps keypress key mvar math sic "
        "abbr tooltip nihongo nihongo2 ill val num gaps su sub sup flag flagcountry noitalic shy chem2".split(),
        "{}",
    ),
    **dict.fromkeys(("interlanguage link", "not a typo", "as written"), "{}"),
    **dict.fromkeys("lang transl transliteration longitem rtl-lang script".split(), _second),
    **dict.fromkeys(("convert", "cvt"), _measure),
    **dict.fromkeys(("frac", "sfrac", "fraction"), _fraction),
    **dict.fromkeys(("quote", "cquote", "blockquote", "quotation", "block quote", "rquote"), "\n\n{}\n\n"),
    **dict.fromkeys(("snd", "spaced ndash", "spnd", "snds", "spaced en dash"), " – "),
    **dict.fromkeys(("ndash", "en dash", "–"), "–"),
    **dict.fromkeys(("mdash", "em dash", "—"), "—"),
    **dict.fromkeys(("'", "-'", "'-"), "'"),
    **dict.fromkeys(('"', '-"', '"-'), '"'),
    **dict.fromkeys(("nbsp", "space", "sp", "thinsp", "hair space", "·", "dot", "bull", "•"), " "),
    **dict.fromkeys(("circa", "c."), "c. {}"),
    **dict.fromkeys(("us$", "usd"), "US${}"),
    **dict.fromkeys(("gbp", "£"), "£{}"),
    **dict.fromkeys(("euro", "€"), "€{}"),
    "inr": "₹{}",
    "as of": "As of {}",
    "floruit": "fl. {}",
    "'s": "'s",
    "=": "=",
    "pi": "π",
    "chem": "".join,
    "ship": lambda arguments: " ".join(arguments[:2]),
    **{prefix.lower(): f"{prefix} {{}}" for prefix in "USS HMS HMAS HMCS SS RMS MV USCGC".split()},
    "lang-": "{}",  # {{lang-fr|mot}}, {{lang-de|Wort}}, ...
}
