"""The scores of single changes to a trained encoder, and the patterns with the smallest total scores within a budget.

The best patterns are found exactly, by dynamic programming from the lowest position to the highest. The state consists
of what the sublayers below pass on, because the cost of a sublayer depends on it.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from lazyformer_fairseq.experiments.search.compress.candidates import Candidates, Placed, Positions
from lazyformer_fairseq.experiments.search.latency import READ, REST
from lazyformer_fairseq.patterns.grammar import PlannedSublayer

REACH = 4  # an ``l`` or ``k`` may read from any of this many ``s`` below it, counting from the nearest

# Bits above the trained model's loss. A sublayer without a score cannot be selected.
Scores = Mapping[Placed, float]


@dataclass(frozen=True)
class Scoring:
    """A pattern to measure in order to score one of its sublayers.

    The score is the part of the pattern's loss that its other changes do not explain.

    Attributes:
        placed: the sublayer to score.
        by_place: the pattern.
    """

    placed: Placed
    by_place: Positions


def list_scorings(candidates: Candidates, reach: int = REACH) -> list[Scoring]:
    """Return a scoring for each sublayer that may be selected, from the lowest position up.

    A sublayer that does not read from another one is scored alone. A sublayer that reads from another one is scored for
    each position that it may read from, up to `reach` such positions below. The attention sublayers in between then
    read from the same position, or are removed if they cannot. For example, replacing the next attention above an ``s``
    with an ``l`` makes a lazy block of two layers. Replacing the attention after that with an ``l`` makes a block of
    three, and its score is the additional loss of the third layer. The total score of a lazy block is therefore the
    block's measured loss, not an estimate.

    Args:
        candidates: the candidates at all positions.
        reach: the maximum number of positions that a sublayer may read from.
    """
    found = []
    for place, options in enumerate(candidates.options):
        for option in options:
            producers: list[Optional[int]] = [None]
            if option.kind.reads is not None:
                below = [each for each in range(place) if _first_producer(candidates, each, option.kind.reads)]
                producers = below[-reach:]
            for producer in producers:
                by_place = _pattern(candidates, place, option, producer)
                if by_place is not None and candidates.is_possible(by_place):
                    found.append(Scoring(Placed(place, option.text, producer), by_place))
    return found


def _first_producer(candidates: Candidates, place: int, what: str) -> Optional[str]:
    """Return a position's first option that passes on `what`, or None if there is none."""
    for option in candidates.options[place]:
        if what in option.kind.hands_on:
            return option.text
    return None


def _pattern(
    candidates: Candidates, place: int, option: PlannedSublayer, producer: Optional[int]
) -> Optional[Positions]:
    """Return the trained model's pattern with one option swapped in that reads from the position `producer`.

    It is None if the option cannot read from there.
    """
    by_place = list(candidates.original)
    by_place[place] = option.text
    if producer is None:
        return tuple(by_place)
    by_place[producer] = _first_producer(candidates, producer, option.kind.reads)
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
    above: Mapping[Positions, float],
) -> dict[Placed, float]:
    """Compute the scores of sublayers from the measured losses of patterns.

    Each score is the part of a pattern's loss that the scores of the pattern's other changes do not explain.

    Args:
        candidates: the candidates at all positions.
        scorings: the scorings, in the order returned by :func:`list_scorings`.
        above: each pattern's loss, in bits above the trained model's.
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


def summed(candidates: Candidates, scores: Scores, by_place: Positions) -> Optional[float]:
    """Return the total score of a valid pattern, or None if a sublayer has no score."""
    placed = candidates.placed(by_place)
    if not all(each in scores for each in placed):
        return None
    return sum(scores[each] for each in placed)


class Producer(NamedTuple):
    """The nearest sublayer below that passes on a given kind of state.

    Attributes:
        what: the name of the state.
        place: the sublayer's position.
        text: the sublayer's text.
        is_read: whether the cost of keeping the state for other sublayers has already been counted.
    """

    what: str
    place: int
    text: str
    is_read: bool


State = tuple[Producer, ...]  # at most one for each `what`, sorted


class Selected(NamedTuple):
    """A pattern, or the lower part of one.

    Attributes:
        by_place: the pattern.
        score: the pattern's total score.
        ticks: the pattern's latency in ticks.
    """

    by_place: Positions
    score: float
    ticks: int


@dataclass(frozen=True)
class Costs:
    """The scores and prices of sublayers; see :func:`select` for the attributes."""

    candidates: Candidates
    scores: Scores
    ticks: Mapping[str, int]

    def add(
        self,
        producers: Mapping[str, Producer],
        place: int,
        option: PlannedSublayer,
    ) -> Optional[tuple[dict[str, Producer], float, int]]:
        """Return the state above an option, the option's score, and its ticks. Return None if the option is impossible.

        Args:
            producers: the state below the option: the nearest producer of each kind of state that is passed on.
            place: the option's position.
            option: the sublayer.
        """
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
    """Return the `count` patterns with the smallest total scores within each limit, in increasing order of score.

    All patterns are considered, except the empty one and patterns with a sublayer that has no score.

    Args:
        candidates: the candidates at all positions.
        scores: the scores of sublayers.
        ticks: the integer prices of sublayers, of sublayers that another one reads from (READ), and of REST.
        limits: the limits, in ticks.
        count: the number of patterns per limit.
    """
    costs = Costs(candidates, scores, ticks)
    # For each position, the highest position that may read from it; above that one, its state is dropped.
    last_consumer: dict[int, int] = {}
    for placed in scores:
        if placed.producer is not None:
            last_consumer[placed.producer] = max(placed.place, last_consumer.get(placed.producer, 0))

    empty = Selected((), 0.0, ticks[REST])
    by_state: dict[State, list[Selected]] = {(): [empty]}
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
                next_state = tuple(sorted(needed))
                for part in lower_parts:
                    by_place = (*part.by_place, option.text)
                    longer = Selected(by_place, part.score + score, part.ticks + cost)
                    following[next_state].append(longer)
        # One more than needed because one of the patterns may be the empty one.
        by_state = {state: _undominated(parts, count + 1) for state, parts in following.items()}

    complete = [each for parts in by_state.values() for each in parts]
    found = [each for each in complete if candidates.pattern(each.by_place)]
    found.sort(key=lambda each: each.score)

    selected = []
    for limit in limits:
        affordable = [each for each in found if each.ticks <= limit]
        selected.append(affordable[:count])
    return selected


def _undominated(parts: list[Selected], count: int) -> list[Selected]:
    """Return the parts that are dominated by fewer than `count` others.

    A part dominates another one if it is at least as fast and its score is at least as good.
    """
    kept = []
    least: list[float] = []  # the `count` smallest scores of parts that are at least as fast
    for part in sorted(parts, key=lambda each: (each.ticks, each.score)):
        if len(least) < count or part.score < least[-1]:
            kept.append(part)
            insort(least, part.score)
            del least[count:]
    return kept
