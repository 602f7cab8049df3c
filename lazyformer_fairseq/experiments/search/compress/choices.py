"""What each sublayer of a trained encoder may become; one choice for each place is a pattern.

Places are those of the trained model's sublayers. ``by_place`` names a pattern by them: the text of each sublayer, that
of identity where it goes.

The patterns with the least sum of scores under a budget of latency are found exactly by dynamic programming, from the
lowest place to the highest. What a choice costs depends on what is handed on from below, so that is the state; for each
state and each whole number of ticks (a small unit of latency) the table holds the least sums.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Optional

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.latency import READ, REST
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, is_possible, places_read, read_sublayer
from lazyformer_fairseq.patterns.kinds import ENCODER, kinds
from lazyformer_fairseq.training.warm_start.start import NONE, can_start_fresh, likeness

ByPlace = tuple[str, ...]
REACH = 4  # an ``l`` or ``k`` may read from so many ``s`` below, the nearest first
MASK, SHARES = "window", (16, 8, 4)  # a setting that costs no weights: windows of these parts of the longest input


class Made(NamedTuple):
    """A sublayer of a pattern.

    Attributes:
        producer: the place that it reads from; None where it reads nothing.
    """

    place: int
    text: str
    producer: Optional[int]


@dataclass(frozen=True)
class Choices:
    """What stands at each place, and what may.

    Attributes:
        options: by place, the trained model's own sublayer first, each without consumers and producer.
    """

    options: tuple[tuple[PlannedSublayer, ...], ...]

    @classmethod
    def of(cls, trained: Sequence[PlannedSublayer], candidates: Sequence[PlannedSublayer]) -> "Choices":
        """The candidates that a place can take.

        Identity goes everywhere. A sublayer goes where it takes the old weights, by
        :func:`~lazyformer_fairseq.training.warm_start.start.likeness`. One that reads and hands on nothing,
        such as ``f``, may also come in place of an attention, and adds nothing before it learns.
        """
        own = [replace(each, consumers=(), producer=None) for each in trained]
        return cls(tuple((old, *(new for new in candidates if _can_become(old, new))) for old in own))

    @cached_property
    def own(self) -> ByPlace:
        """The trained model's pattern."""
        return tuple(options[0].text for options in self.options)

    @cached_property
    def sublayers(self) -> dict[str, PlannedSublayer]:
        """By text all that may stand somewhere."""
        return {each.text: each for options in self.options for each in options if not each.kind.is_identity}

    @cached_property
    def _by_text(self) -> tuple[dict[str, PlannedSublayer], ...]:
        return tuple({each.text: each for each in options} for options in self.options)

    def planned(self, place: int, text: str) -> PlannedSublayer:
        return self._by_text[place][text]

    def has(self, place: int, text: str) -> bool:
        return text in self._by_text[place]

    def kept(self, by_place: ByPlace) -> Iterator[tuple[int, PlannedSublayer]]:
        """The sublayers that stay, with their places."""
        for place, text in enumerate(by_place):
            planned = self.planned(place, text)
            if not planned.kind.is_identity:
                yield place, planned

    def pattern(self, by_place: ByPlace) -> str:
        """Written out, without what goes."""
        return "".join(planned.text for _, planned in self.kept(by_place))

    def origins(self, by_place: ByPlace) -> list[str]:
        """For each sublayer of the pattern the old one that it starts from, as ``--from-sublayers`` takes them."""
        return [
            str(place) if likeness(self.options[place][0], planned) else NONE for place, planned in self.kept(by_place)
        ]

    def is_possible(self, by_place: ByPlace) -> bool:
        """Whether an encoder can be built of it: it is not empty, and each consumer has what it reads below it."""
        return is_possible(self.pattern(by_place), ENCODER)

    def made(self, by_place: ByPlace) -> list[Made]:
        """The sublayers of a possible pattern, the lowest first."""
        kept = list(self.kept(by_place))
        read = places_read([planned for _, planned in kept])
        return [
            Made(place, planned.text, None if at is None else kept[at][0])
            for (place, planned), at in zip(kept, read, strict=True)
        ]

    def all_made(self, by_place: ByPlace) -> list[Made]:
        """The same, and what goes: one for each place."""
        stays = {each.place: each for each in self.made(by_place)}
        return [stays.get(place, Made(place, text, None)) for place, text in enumerate(by_place)]


def _can_become(old: PlannedSublayer, new: PlannedSublayer) -> bool:
    if old.kind.is_identity or old.text == new.text:
        return False
    if new.kind.is_identity or likeness(old, new):
        return True
    attends = bool(old.kind.hands_on or old.kind.reads)
    return attends and not (new.kind.hands_on or new.kind.reads) and can_start_fresh(new)


def default_candidates(trained: Sequence[PlannedSublayer], longest: int) -> list[PlannedSublayer]:
    """Every kind that takes the weights of one of these sublayers, windows for those that have them, and identity.

    Args:
        longest: tokens that the model reads; windows are a sixteenth, an eighth and a quarter of it to either side.
    """
    plain = [PlannedSublayer(kind) for kind in kinds() if ENCODER in kind.modules]
    fitting = [each for each in plain if each.kind.is_identity or any(likeness(old, each) for old in trained)]
    windows = dict.fromkeys(max(1, longest // share) for share in SHARES)
    narrow = [
        replace(each, settings=((MASK, window),)) for each in fitting if each.kind.setting(MASK) for window in windows
    ]
    return sorted([*fitting, *narrow], key=lambda each: kinds().index(each.kind))


def read_candidates(words: Sequence[str]) -> list[PlannedSublayer]:
    """As written in a pattern, or by name, each once.

    Raises:
        UserError: one is no sublayer, or not for encoders.
    """
    found: dict[str, PlannedSublayer] = {}
    for word in words:
        try:
            candidate = read_sublayer(word)
        except UserError as error:
            raise UserError(f"--candidates: {error}") from None
        if ENCODER not in candidate.kind.modules:
            raise UserError(f"--candidates: {word}: {candidate.kind.name} is not for encoders")
        found[candidate.text] = candidate
    return list(found.values())


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


def list_scorings(choices: Choices, reach: int = REACH) -> list[Scoring]:
    """One for each sublayer that may be chosen, from the bottom up.

    A sublayer that reads nothing is scored alone. One that reads is scored for each place that it may read from, up to
    `reach` such places below. Those in between then read from there too (or go, where they cannot): with an ``s``
    below, an ``l`` at the next attention is a lazy block of two, an ``l`` at the one above it a block of three, and its
    score is what the third costs more. So the sum over a lazy block is the loss of that block, not a guess.
    """
    found = []
    for place, options in enumerate(choices.options):
        for option in options:
            producers: list[Optional[int]] = [None]
            if option.kind.reads is not None:
                producers = [each for each in range(place) if _handing_on(choices, each, option.kind.reads)][-reach:]
            for producer in producers:
                by_place = _pattern(choices, place, option, producer)
                if by_place is not None and choices.is_possible(by_place):
                    found.append(Scoring(Made(place, option.text, producer), by_place))
    return found


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
                    to, score, cost = step
                    arriving[to].append((_Arrival(state, option.text, cost), _moved(layer.sums_KT, cost) + score))
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
    return sum(
        max([0, *(ticks[each.text] - ticks[each.text + READ] for each in options if each.kind.kept_for_consumers)])
        for options in choices.options
    )


def _step(
    choices: Choices,
    scores: Scores,
    ticks: Mapping[str, int],
    last_consumer: Mapping[int, int],
    state: State,
    place: int,
    option: PlannedSublayer,
) -> Optional[tuple[State, float, int]]:
    """The next state, and what a choice at a place adds to the sum and to the ticks; None where it is not possible."""
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
    return tuple(to), score, cost


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
