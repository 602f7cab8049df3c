"""A count of the words seen in training, for checkpoints at set word counts and for word budgets such as BabyLM's."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lazyformer_fairseq.errors import UserError


@dataclass
class WordCounter:
    """A counter of a run's training words that determines when checkpoints are due.

    Attributes:
        tokens: the number of training tokens so far.
        marks: the word counts at which to keep checkpoints.
        words_per_token: the corpus's average number of words per token; needed only if there are marks.
    """

    tokens: int = 0
    marks: Sequence[int] = ()
    words_per_token: float = 0.0

    @property
    def words(self) -> float:
        """The approximate number of training words so far."""
        return self.tokens * self.words_per_token

    def add(self, tokens: int) -> list[str]:
        """Add an update's tokens, and return the names of the checkpoints now due, without file extensions."""
        before = self.words
        self.tokens += tokens
        return [f"checkpoint_{mark / 10**6:g}M_words" for mark in self.marks if before < mark <= self.words]


def checkpoints_by_words(folder: Path) -> dict[str, Path]:
    """Return a folder's checkpoints at word counts, by names like ``10M``, in ascending order."""
    found: dict[str, Path] = {}
    for path in folder.glob("checkpoint_*M_words.pt"):
        words = re.fullmatch(r"checkpoint_([0-9.e+-]+M)_words\.pt", path.name)
        if words is not None:
            found[words[1]] = path
    ascending = sorted(found, key=lambda name: float(name.removesuffix("M")))
    return {name: found[name] for name in ascending}


def refuse_too_many_words(budget: int, words: float, reader: str, length: str, remedy: str) -> None:
    """Raise a UserError if a run would be trained on more words than its budget allows.

    Args:
        budget: the value of ``--word-budget``.
        words: the number of training words, including repetitions.
        reader: the subject of the message, such as the model's name.
        length: the length of the run, such as ``its 4 updates``.
        remedy: how to shorten the run, such as ``fewer --updates``.
    """
    if words > budget:
        raise UserError(
            f"--word-budget {budget:,}: {reader} would read {round(words):,} words in {length}; use {remedy} or a "
            "larger word budget"
        )
