"""What each change costs in loss, from few measurements: a sum of them predicts the loss of any pattern."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from lazyformer_fairseq.experiments.search.from_checkpoint.choices import ByPlace, Choices, Made
from lazyformer_fairseq.patterns.grammar import PlannedSublayer

# Bits above the trained model's loss. What is not there cannot be chosen.
Scores = Mapping[Made, float]


@dataclass(frozen=True)
class Scoring:
    """A pattern to measure, and whose score is what it costs beyond the other changes in it.

    Attributes:
        made: the sublayer that is scored.
        by_place: the pattern.
    """

    made: Made
    by_place: ByPlace


def list_scorings(choices: Choices, reach: int) -> list[Scoring]:
    """One for each sublayer that may be chosen, from the bottom up.

    A sublayer that reads nothing is scored alone. One that reads is scored for each place that it may read from, up to
    `reach` such places below. Those in between then read from there too (or go, where they cannot): with an ``s``
    below, an ``l`` at the next attention is a lazy block of two, an ``l`` at the one above it a block of three, and its
    score is what the third costs more. So the sum over a lazy block is the loss of that block, not a guess.
    """
    found = []
    for place, options in enumerate(choices.options):
        for option in options:
            producers = [None] if option.kind.reads is None else _producers(choices, place, option, reach)
            for producer in producers:
                by_place = _pattern(choices, place, option, producer)
                if by_place is not None and choices.is_possible(by_place):
                    found.append(Scoring(Made(place, option.text, producer), by_place))
    return found


def _producers(choices: Choices, place: int, option: PlannedSublayer, reach: int) -> list[int]:
    below = [each for each in range(place) if _handing_on(choices, each, option.kind.reads)]
    return below[-reach:]


def _handing_on(choices: Choices, place: int, what: str) -> Optional[str]:
    """Its first option that hands this on; None where none does."""
    return next((each.text for each in choices.options[place] if what in each.kind.hands_on), None)


def _pattern(choices: Choices, place: int, option: PlannedSublayer, producer: Optional[int]) -> Optional[ByPlace]:
    by_place = list(choices.own)
    by_place[place] = option.text
    if producer is not None:
        by_place[producer] = _handing_on(choices, producer, option.kind.reads)
        for between in range(producer + 1, place):
            if option.kind.reads in choices.options[between][0].kind.hands_on:
                others = [option.text, *(each.text for each in choices.options[between] if each.kind.is_identity)]
                fitting = next((text for text in others if choices.has(between, text)), None)
                if fitting is None:
                    return None
                by_place[between] = fitting
    return tuple(by_place)


def scores_of(choices: Choices, scorings: Sequence[Scoring], above: Mapping[ByPlace, float]) -> dict[Made, float]:
    """Scores from measured losses: of each pattern what the other changes in it leave unexplained.

    Args:
        scorings: of :func:`list_scorings`, in its order.
        above: by pattern, bits above the trained model's loss.
    """
    scores: dict[Made, float] = {}
    for scoring in scorings:
        others = [made for made in choices.all_made(scoring.by_place) if made.text != choices.own[made.place]]
        known = sum(scores[made] for made in others if made.place != scoring.made.place)
        scores[scoring.made] = above[scoring.by_place] - known
    return scores


def summed(choices: Choices, scores: Scores, by_place: ByPlace) -> Optional[float]:
    """The sum of a possible pattern's scores; None where one of them is none."""
    made = choices.all_made(by_place)
    return sum(scores[each] for each in made) if all(each in scores for each in made) else None
