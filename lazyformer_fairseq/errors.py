"""UserError, the package's exception for mistakes that the user can correct."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Optional

MOST_DIGITS = 18  # any number this short fits into 64 bits


class UserError(ValueError):
    """An error that the user can correct: its message names the value, the file and the line, and says what to do.

    Commands print it without a traceback (see ``reliability.command_line``).
    """


def whole_number(text: str) -> Optional[int]:
    """Parse a whole number in ASCII digits; return None for any other text and for numbers with too many digits.

    ``str.isdigit`` accepts superscripts, which ``int`` rejects, and ``int`` also rejects numbers with thousands of
    digits.
    """
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    if is_number:
        return int(text)
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint to append to a message about an unknown name: ``; did you mean bert_base?``, or an empty string."""
    names = get_close_matches(name, list(known), n=3)
    if names:
        return f"; did you mean {', '.join(names)}?"
    return ""
