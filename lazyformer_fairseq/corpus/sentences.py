"""Divides cased text into sentences by spaCy, and mends what its rule-based sentencizer gets wrong in English.

Appendix A of the LazyFormer paper segments by spaCy. It must see the text before it is lower-cased.
"""

import re
from collections.abc import Iterator
from typing import Optional

import spacy

from lazyformer_fairseq.errors import UserError

OPENING_MARKS = re.compile(r"(?<=\s)[\"'“‘(\[]+$")
ENDS_IN_ABBREVIATION = re.compile(
    r"\b(?:[Ff]igs?|[Ee]qs?|[Ss]ecs?|[Vv]ols?|[Cc]h|[Nn]os?|pp?|cf|vs|viz|approx|resp|etc)\.\s*$"
)
ENDS_IN_CLOSING_QUOTE = re.compile(r"[.?!…][\"'”’)\]]+\s*$")


class SentenceSplitter:
    """Callable: a paragraph of cased text -> its sentences, in order, stripped; no character but space is lost.

    Args:
        spacy_model: name of an installed spaCy pipeline that sets sentence boundaries (``en_core_web_sm``);
            None for the rules, which need no trained model and are some 50 times faster.

    Raises:
        UserError: ``spacy_model`` is not installed.
    """

    def __init__(self, spacy_model: Optional[str] = None):
        if spacy_model is None:
            self._spacy = spacy.blank("en")
            self._spacy.add_pipe("sentencizer")
            self._spacy.max_length = 1 << 31  # the default guards trained models' memory
        else:
            try:
                self._spacy = spacy.load(spacy_model)
            except OSError:
                raise UserError(f"spaCy model {spacy_model!r}: not installed; `spacy download {spacy_model}`") from None

    def __call__(self, paragraph: str) -> list[str]:
        starts = [sentence.start_char for sentence in self._spacy(paragraph).sents]
        starts = [0, *_mended(paragraph, starts[1:])]
        sentences = (paragraph[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=False))
        return [sentence for sentence in sentences if sentence]


def _mended(text: str, starts: list[int]) -> Iterator[int]:
    """The true ones among the places (character offsets) where spaCy lets a sentence start."""
    previous = 0
    for start in starts:
        # An opening quote or bracket belongs to the sentence that it opens; spaCy leaves it with the one before.
        opening = OPENING_MARKS.search(text, previous, start)
        if opening:
            start = opening.start()
        before = text[previous:start]
        if before[-1:].isspace() and not _goes_on(before, text[start]):
            yield start
            previous = start


def _goes_on(before: str, first_letter: str) -> bool:
    """Whether a sentence that seems to end with ``before`` goes on with ``first_letter``."""
    if ENDS_IN_ABBREVIATION.search(before[-16:]):
        return not first_letter.isupper()
    return first_letter.islower() and ENDS_IN_CLOSING_QUOTE.search(before[-8:]) is not None
