"""The one exception for a user's mistake."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Optional

MOST_DIGITS = 18  # of a number that fits 64 bits


class UserError(ValueError):
    """Something the user can mend: the message names the value, the file and the line, and says what to do.

    Command lines print it without a traceback (see ``reliability.command_line``).
    """


def whole_number(text: str) -> Optional[int]:
    """Return the number that a user's text gives in ASCII digits; None for any other text, and for too many digits.

    ``str.isdigit`` takes a superscript for a digit, which ``int`` does not, and ``int`` refuses 5,000 digits.
    """
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    if is_number:
        return int(text)
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about a name that is not known: ``; did you mean bert_base?``, or nothing."""
    names = get_close_matches(name, list(known), n=3)
    if names:
        return f"; did you mean {', '.join(names)}?"
    return ""
