"""Yardsticks for language models: the losses of predictors that only count tokens in the training text."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lazyformer_fairseq.data.masked_text import MaskedText

CLEARLY_BELOW = 0.1  # bits; smaller differences may be due to the choice of validation text
NEIGHBOURS = "the two tokens on either side"
BEFORE = "the four tokens before"


@dataclass(frozen=True)
class Yardsticks:
    """Losses of count-based predictors on validation text, in bits per prediction.

    Attributes:
        unigram: the loss of predicting from token frequencies alone.
        counts: the loss of a :class:`~lazyformer_fairseq.data.count_model.CountModel`.
        context: a description of the tokens that the count model sees.
    """

    unigram: float
    counts: float
    context: str

    def describe(self, unit: str, shown: Callable[[float], float] = float) -> str:
        """Return a sentence that states both yardsticks in `unit`; `shown` converts a loss in bits to that unit."""
        return (
            f"Yardsticks ({unit}): the unigram loss is {shown(self.unigram):.2f}; a table of counts that sees "
            f"{self.context} reaches {shown(self.counts):.2f} (with Witten-Bell interpolation)."
        )

    def warn(self, losses: Mapping[str, float]) -> list[str]:
        """Return warnings about models whose loss, in bits, is not below a yardstick."""
        at_unigram = [name for name, loss in losses.items() if not loss < self.unigram - CLEARLY_BELOW]  # NaN too
        above = [name for name, loss in losses.items() if name not in at_unigram and not loss < self.counts]
        sentences = []
        if at_unigram:
            sentences.append(
                f"No more than {CLEARLY_BELOW:g} bits below the unigram loss: {', '.join(at_unigram)}. These models "
                "have learned no more than how often each token occurs, so the differences between them say nothing "
                "about the patterns. Train longer."
            )
        if above:
            sentences.append(
                f"Not below the loss of the table of counts: {', '.join(above)}. Counting {self.context} still "
                "predicts better than these models do."
            )
        return sentences


def yardsticks_of(text: MaskedText, batches: Iterable[Mapping[str, Any]]) -> Yardsticks:
    """Compute the yardsticks for the masked tokens in `batches` from token counts in the training text."""
    batches = list(batches)
    return Yardsticks(text.cost_of_frequencies(batches), text.count_model_loss(batches), NEIGHBOURS)
