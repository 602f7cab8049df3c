"""The patterns with the least sum of scores under a budget of latency, found exactly by dynamic programming.

It goes from the lowest place to the highest. What a choice costs depends on what is handed on from below, so that is
the state; for each state and each whole number of ticks (a small unit of latency) the table holds the least sums.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np

from lazyformer_fairseq.experiments.search.compress.choices import ByPlace, Choices, Made, Scores
from lazyformer_fairseq.experiments.search.latency import READ, REST
from lazyformer_fairseq.patterns.grammar import PlannedSublayer


class Given(NamedTuple):
    """The newest sublayer that hands something on.

    Attributes:
        is_read: whether keeping it for consumers is paid already.
    """

    what: str
    place: int
    text: str
    is_read: bool


State = tuple[Given, ...]  # at most one for each `what`, sorted


class Step(NamedTuple):
    """A choice at a place, from a state: the next state, what it adds to the sum and to the ticks."""

    to: State
    score: float
    ticks: int


class Found(NamedTuple):
    """A pattern, the sum of its scores, its ticks."""

    by_place: ByPlace
    score: float
    ticks: int


class _Arrival(NamedTuple):
    before: State
    text: str
    ticks: int


class _Layer(NamedTuple):
    """What is known of a state behind a place.

    Attributes:
        sums_KT: the K least sums of each number of ticks; infinite where there are fewer.
        which_KT: for each the number of its arrival, and of its rank in the state before: arrival * K + rank.
    """

    sums_KT: np.ndarray
    arrivals: list[_Arrival]
    which_KT: np.ndarray


def best_choices(
    choices: Choices, scores: Scores, ticks: Mapping[str, int], limits: Sequence[int], count: int = 1
) -> list[list[Found]]:
    """For each limit the `count` patterns with the least sums among all whose ticks stay within it, the least first.

    Exact: no pattern is left out but those with a choice that has no score, and the empty one.

    Args:
        ticks: by name, as prices: of sublayers alone, with READ where another one reads them, and of the REST.
        limits: in ticks.
    """
    kept = count + 1  # one of them may be the empty pattern
    room = max(limits) + 1 + _slack(choices, ticks)
    start = np.full((kept, room), np.inf)
    if ticks[REST] < room:
        start[0, ticks[REST]] = 0.0
    layers: list[dict[State, _Layer]] = [{(): _Layer(start, [], np.empty(0))}]
    last_consumer = _last_consumers(scores)
    for place, options in enumerate(choices.options):
        arriving: dict[State, list[tuple[_Arrival, np.ndarray]]] = defaultdict(list)
        for state, layer in layers[-1].items():
            for option in options:
                step = _step(choices, scores, ticks, last_consumer, state, place, option)
                if step is not None:
                    arrival = _Arrival(state, option.text, step.ticks)
                    arriving[step.to].append((arrival, _moved(layer.sums_KT, step.ticks) + step.score))
        layers.append({state: _merged(found, kept) for state, found in arriving.items()})
    return [_least(choices, layers, limit, count) for limit in limits]


def _last_consumers(scores: Scores) -> dict[int, int]:
    """For each place that is read the highest that may read it: from there on nobody needs to know of it."""
    last: dict[int, int] = {}
    for made in scores:
        if made.producer is not None:
            last[made.producer] = max(made.place, last.get(made.producer, 0))
    return last


def _slack(choices: Choices, ticks: Mapping[str, int]) -> int:
    """By how much ticks may fall again: where a sublayer that is read costs less than alone."""
    falls = [
        max([0, *(ticks[each.text] - ticks[each.text + READ] for each in options if each.kind.kept_for_consumers)])
        for options in choices.options
    ]
    return sum(falls)


def _step(
    choices: Choices,
    scores: Scores,
    ticks: Mapping[str, int],
    last_consumer: Mapping[int, int],
    state: State,
    place: int,
    option: PlannedSublayer,
) -> Optional[Step]:
    """None where the choice is not possible in this state."""
    given = {each.what: each for each in state}
    kind, cost, producer = option.kind, ticks[option.text] if not option.kind.is_identity else 0, None
    if kind.reads is not None:
        producer = given.get(kind.reads)
        if producer is None:
            return None
        read = choices.planned(producer.place, producer.text)
        if kind.check_producer(read.values):
            return None
        if kind.reads in read.kind.kept_for_consumers and not producer.is_read:
            cost += ticks[producer.text + READ] - ticks[producer.text]
            given[kind.reads] = producer._replace(is_read=True)
    score = scores.get(Made(place, option.text, None if producer is None else producer.place))
    if score is None:
        return None
    given |= {what: Given(what, place, option.text, False) for what in kind.hands_on}
    to = sorted(each for each in given.values() if last_consumer.get(each.place, -1) > place)
    return Step(tuple(to), score, cost)


def _moved(sums_KT: np.ndarray, ticks: int) -> np.ndarray:
    """The same sums, so many ticks later (earlier, if negative)."""
    moved = np.full_like(sums_KT, np.inf)
    room = sums_KT.shape[1]
    if abs(ticks) < room:
        moved[:, max(ticks, 0) : room + min(ticks, 0)] = sums_KT[:, max(-ticks, 0) : room - max(ticks, 0)]
    return moved


def _merged(found: Sequence[tuple[_Arrival, np.ndarray]], kept: int) -> _Layer:
    sums = np.concatenate([sums_KT for _, sums_KT in found])
    which = np.argsort(sums, axis=0, kind="stable")[:kept]
    arrivals = [arrival for arrival, _ in found]
    return _Layer(np.take_along_axis(sums, which, axis=0), arrivals, which.astype(np.int32))


def _least(choices: Choices, layers: Sequence[Mapping[State, _Layer]], limit: int, count: int) -> list[Found]:
    ends = [
        (float(layer.sums_KT[rank, tick]), int(tick), int(rank), state)
        for state, layer in layers[-1].items()
        for rank, tick in _least_cells(layer.sums_KT[:, : limit + 1], count + 1)
    ]
    found = []
    for score, tick, rank, state in sorted(ends)[: count + 1]:
        by_place = _walk_back(layers, state, rank, tick)
        if any(True for _ in choices.kept(by_place)):
            found.append(Found(by_place, score, tick))
    return found[:count]


def _least_cells(sums_KT: np.ndarray, count: int) -> list[tuple[int, int]]:
    cells = np.argsort(sums_KT, axis=None, kind="stable")[:count]
    places = zip(*np.unravel_index(cells, sums_KT.shape), strict=True)
    return [(rank, tick) for rank, tick in places if np.isfinite(sums_KT[rank, tick])]


def _walk_back(layers: Sequence[Mapping[State, _Layer]], state: State, rank: int, tick: int) -> ByPlace:
    texts = []
    for layer in reversed(layers[1:]):
        which, before = divmod(int(layer[state].which_KT[rank, tick]), layer[state].sums_KT.shape[0])
        arrival = layer[state].arrivals[which]
        texts.append(arrival.text)
        state, rank, tick = arrival.before, before, tick - arrival.ticks
    return tuple(reversed(texts))
