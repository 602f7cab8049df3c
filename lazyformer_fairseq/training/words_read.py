"""The words that a training reads: checkpoints at some numbers of them, and a budget, as of BabyLM's rules."""

from collections.abc import Sequence
from dataclasses import dataclass

from lazyformer_fairseq.errors import UserError


@dataclass
class WordCounter:
    """Counts what a training reads, and says which checkpoints are due.

    Attributes:
        tokens: tokens read so far.
        marks: numbers of words at which a checkpoint is kept.
        words_per_token: the corpus's own count; only marks need it.
    """

    tokens: int = 0
    marks: Sequence[int] = ()
    words_per_token: float = 0.0

    @property
    def words(self) -> float:
        """The words read so far, about."""
        return self.tokens * self.words_per_token

    def add(self, tokens: int) -> list[str]:
        """Count the tokens of an update; return the names of checkpoints that are due, without ending."""
        before = self.words
        self.tokens += tokens
        return [f"checkpoint_{mark / 10**6:g}M_words" for mark in self.marks if before < mark <= self.words]


def refuse_too_many_words(budget: int, words: float, reader: str, length: str, remedy: str) -> None:
    """Raise a UserError for a training that would read more words than its budget allows.

    Args:
        budget: the value of ``--word-budget``.
        words: the words that the training would read, repetitions included.
        reader: the name of what reads them.
        length: the length of the training, such as ``its 4 updates``.
        remedy: the options that would make it shorter.
    """
    if words > budget:
        raise UserError(
            f"--word-budget {budget:,}: {reader} would read {round(words):,} words in {length}; give {remedy} or a "
            "larger budget of words"
        )
