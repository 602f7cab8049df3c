"""How long a text is, in letters and words of English: a measure for scripts that write more with fewer signs."""

import re

# Letters and marks of Chinese, Japanese and Korean. Their texts have a third to a half of the characters of an English
# one, and Chinese and Japanese no spaces: a sign counts for three letters, two signs for a word.
WIDE = re.compile("[\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff01-\uffdc\U00020000-\U0003ffff]")
LETTERS_OF_A_SIGN, SIGNS_OF_A_WORD = 3, 2


def length_in_letters(text: str) -> int:
    """Characters, each sign of Chinese, Japanese or Korean counted for three."""
    return len(text) + (LETTERS_OF_A_SIGN - 1) * _signs(text)


def has_words(text: str, at_least: int) -> bool:
    """Whether so many words are in ``text``: between spaces, and of two signs of Chinese, Japanese or Korean each."""
    words = len(text.split(maxsplit=at_least))
    return words >= at_least or words + _signs(text) // SIGNS_OF_A_WORD >= at_least


def _signs(text: str) -> int:
    return 0 if text.isascii() else len(WIDE.findall(text))
