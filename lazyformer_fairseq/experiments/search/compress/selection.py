"""Scores of single changes of a trained encoder, and the patterns with the least sums of scores under a budget.

The best patterns are found exactly by dynamic programming, from the lowest place to the highest. What a sublayer costs
depends on what is handed on from below, so that is the state.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from lazyformer_fairseq.experiments.search.compress.candidates import ByPlace, Candidates, Placed
from lazyformer_fairseq.experiments.search.latency import READ, REST
from lazyformer_fairseq.patterns.grammar import PlannedSublayer

REACH = 4  # an ``l`` or ``k`` may read from so many ``s`` below, the nearest first

# Bits above the trained model's loss. A sublayer without a score cannot be selected.
Scores = Mapping[Placed, float]


@dataclass(frozen=True)
class Scoring:
    """A pattern to measure, whose loss beyond the other changes in it is the score of one sublayer.

    Attributes:
        placed: the sublayer that is scored.
        by_place: the pattern.
    """

    placed: Placed
    by_place: ByPlace


def list_scorings(candidates: Candidates, reach: int = REACH) -> list[Scoring]:
    """Return one for each sublayer that may be selected, from the bottom up.

    A sublayer that reads nothing is scored alone. One that reads is scored for each place that it may read from, up to
    `reach` such places below. Those in between then read from there too (or go, where they cannot): with an ``s``
    below, an ``l`` at the next attention is a lazy block of two, an ``l`` at the one above it a block of three, and its
    score is what the third costs more. So the sum over a lazy block is the loss of that block, not a guess.
    """
    found = []
    for place, options in enumerate(candidates.options):
        for option in options:
            producers: list[Optional[int]] = [None]
            if option.kind.reads is not None:
                below = [each for each in range(place) if _handing_on(candidates, each, option.kind.reads)]
                producers = below[-reach:]
            for producer in producers:
                by_place = _pattern(candidates, place, option, producer)
                if by_place is not None and candidates.is_possible(by_place):
                    found.append(Scoring(Placed(place, option.text, producer), by_place))
    return found


def _handing_on(candidates: Candidates, place: int, what: str) -> Optional[str]:
    """Return a place's first option that hands this on; None where none does."""
    return next((each.text for each in candidates.options[place] if what in each.kind.hands_on), None)


def _pattern(candidates: Candidates, place: int, option: PlannedSublayer, producer: Optional[int]) -> Optional[ByPlace]:
    """Return the trained model's pattern with one option in it, which reads from a place; None where it cannot."""
    by_place = list(candidates.original)
    by_place[place] = option.text
    if producer is None:
        return tuple(by_place)
    by_place[producer] = _handing_on(candidates, producer, option.kind.reads)
    for between in range(producer + 1, place):
        if option.kind.reads not in candidates.options[between][0].kind.hands_on:
            continue
        identities = [each.text for each in candidates.options[between] if each.kind.is_identity]
        fitting = [text for text in (option.text, *identities) if text in candidates.by_text[between]]
        if not fitting:
            return None
        by_place[between] = fitting[0]
    return tuple(by_place)


def scores_of(
    candidates: Candidates,
    scorings: Sequence[Scoring],
    above: Mapping[ByPlace, float],
) -> dict[Placed, float]:
    """Return scores from measured losses: of each pattern what the other changes in it leave unexplained.

    Args:
        candidates: the candidates of all places.
        scorings: what :func:`list_scorings` returned, in its order.
        above: how many bits the loss of each pattern is above the trained model's.
    """
    scores: dict[Placed, float] = {}
    for scoring in scorings:
        known = 0.0
        for placed in candidates.placed(scoring.by_place):
            is_changed = placed.text != candidates.original[placed.place]
            if is_changed and placed.place != scoring.placed.place:
                known += scores[placed]
        scores[scoring.placed] = above[scoring.by_place] - known
    return scores


def summed(candidates: Candidates, scores: Scores, by_place: ByPlace) -> Optional[float]:
    """Return the sum of a possible pattern's scores; None where a sublayer has none."""
    placed = candidates.placed(by_place)
    if not all(each in scores for each in placed):
        return None
    return sum(scores[each] for each in placed)


class Producer(NamedTuple):
    """The newest sublayer that hands something on.

    Attributes:
        what: it hands on.
        place: its place.
        text: its text.
        is_read: whether keeping it for consumers is paid already.
    """

    what: str
    place: int
    text: str
    is_read: bool


State = tuple[Producer, ...]  # at most one for each `what`, sorted


class Selected(NamedTuple):
    """A pattern, or its lower part; the sum of its scores; its ticks."""

    by_place: ByPlace
    score: float
    ticks: int


@dataclass(frozen=True)
class Costs:
    """The scores and ticks of sublayers; see :func:`select`."""

    candidates: Candidates
    scores: Scores
    ticks: Mapping[str, int]

    def add(
        self,
        producers: Mapping[str, Producer],
        place: int,
        option: PlannedSublayer,
    ) -> Optional[tuple[dict[str, Producer], float, int]]:
        """Return what is handed on above an option, and its score and ticks; None where it is not possible."""
        handed_on = dict(producers)
        if option.kind.is_identity:
            cost = 0
        else:
            cost = self.ticks[option.text]
        read_from = None
        if option.kind.reads is not None:
            producer = producers.get(option.kind.reads)
            if producer is None:
                return None
            planned = self.candidates.by_text[producer.place][producer.text]
            if option.kind.check_producer(planned.values):
                return None
            read_from = producer.place
            if option.kind.reads in planned.kind.kept_for_consumers and not producer.is_read:
                cost += self.ticks[producer.text + READ] - self.ticks[producer.text]
                handed_on[option.kind.reads] = producer._replace(is_read=True)
        score = self.scores.get(Placed(place, option.text, read_from))
        if score is None:
            return None
        for what in option.kind.hands_on:
            handed_on[what] = Producer(what, place, option.text, is_read=False)
        return handed_on, score, cost


def select(
    candidates: Candidates,
    scores: Scores,
    ticks: Mapping[str, int],
    limits: Sequence[int],
    count: int = 1,
) -> list[list[Selected]]:
    """Return for each limit the `count` patterns with the least sums whose ticks stay within it, the least first.

    No pattern is left out but those with a sublayer that has no score, and the empty one.

    Args:
        candidates: the candidates of all places.
        scores: the scores of sublayers.
        ticks: prices as whole numbers: of sublayers alone, with READ where another one reads them, and of the REST.
        limits: the limits, in ticks.
        count: the number of patterns per limit.
    """
    costs = Costs(candidates, scores, ticks)
    last_consumer: dict[int, int] = {}  # from there on nobody needs to know of a place
    for placed in scores:
        if placed.producer is not None:
            last_consumer[placed.producer] = max(placed.place, last_consumer.get(placed.producer, 0))

    by_state: dict[State, list[Selected]] = {(): [Selected((), 0.0, ticks[REST])]}
    for place, options in enumerate(candidates.options):
        following: dict[State, list[Selected]] = defaultdict(list)
        for state, lower_parts in by_state.items():
            producers = {each.what: each for each in state}
            for option in options:
                step = costs.add(producers, place, option)
                if step is None:
                    continue
                handed_on, score, cost = step
                needed = [each for each in handed_on.values() if last_consumer.get(each.place, -1) > place]
                for part in lower_parts:
                    longer = Selected((*part.by_place, option.text), part.score + score, part.ticks + cost)
                    following[tuple(sorted(needed))].append(longer)
        # One of the patterns that are kept may be the empty one.
        by_state = {state: _undominated(parts, count + 1) for state, parts in following.items()}

    found = [each for parts in by_state.values() for each in parts if candidates.pattern(each.by_place)]
    found.sort(key=lambda each: each.score)
    return [[each for each in found if each.ticks <= limit][:count] for limit in limits]


def _undominated(parts: list[Selected], count: int) -> list[Selected]:
    """Return the parts of one state than which fewer than `count` others are as fast and have as small a sum."""
    kept = []
    least: list[float] = []  # the `count` least sums of those that are as fast
    for part in sorted(parts, key=lambda each: (each.ticks, each.score)):
        if len(least) < count or part.score < least[-1]:
            kept.append(part)
            insort(least, part.score)
            del least[count:]
    return kept
