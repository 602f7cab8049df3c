"""Counting the words that a training reads, for checkpoints at given counts and for word budgets such as BabyLM's."""

from collections.abc import Sequence
from dataclasses import dataclass

from lazyformer_fairseq.errors import UserError


@dataclass
class WordCounter:
    """A counter of the words that a training has read, which knows when checkpoints are due.

    Attributes:
        tokens: the number of tokens read so far.
        marks: the numbers of words at which checkpoints are kept.
        words_per_token: the corpus's average number of words per token; needed only if there are marks.
    """

    tokens: int = 0
    marks: Sequence[int] = ()
    words_per_token: float = 0.0

    @property
    def words(self) -> float:
        """The approximate number of words read so far."""
        return self.tokens * self.words_per_token

    def add(self, tokens: int) -> list[str]:
        """Count the tokens of an update; return the names of the checkpoints now due, without file extension."""
        before = self.words
        self.tokens += tokens
        return [f"checkpoint_{mark / 10**6:g}M_words" for mark in self.marks if before < mark <= self.words]


def refuse_too_many_words(budget: int, words: float, reader: str, length: str, remedy: str) -> None:
    """Raise a UserError if a training would read more words than its budget allows.

    Args:
        budget: the value of ``--word-budget``.
        words: the number of words that the training would read, including repetitions.
        reader: the subject of the message, such as the name of the model.
        length: the length of the training, such as ``its 4 updates``.
        remedy: how to make the training shorter, such as ``fewer --updates``.
    """
    if words > budget:
        raise UserError(
            f"--word-budget {budget:,}: {reader} would read {round(words):,} words in {length}; give {remedy} or a "
            "larger word budget"
        )
