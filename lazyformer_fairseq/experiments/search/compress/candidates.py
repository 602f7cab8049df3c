"""The sublayers that may stand at each place of a trained encoder: its own, and candidates that could replace them.

Places are those of the trained model's sublayers. ``by_place`` names a pattern by them: the text of each sublayer, that
of identity where it goes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.settings import read_sublayers
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, is_possible, places_read
from lazyformer_fairseq.patterns.kinds import ENCODER, kinds
from lazyformer_fairseq.training.warm_start.start import NONE, can_start_fresh, likeness

ByPlace = tuple[str, ...]
WINDOW = "window"  # a setting that costs no weights
WINDOW_SHARES = (16, 8, 4)  # windows of these parts of the longest input


class Placed(NamedTuple):
    """A sublayer of a pattern.

    Attributes:
        place: the place of the trained model's sublayer that it replaces or is.
        text: the text of the sublayer.
        producer: the place that it reads from; None where it reads nothing.
    """

    place: int
    text: str
    producer: Optional[int]


@dataclass(frozen=True)
class Candidates:
    """The sublayers that may stand at each place.

    Attributes:
        options: the sublayers by place, the trained model's own first, each without consumers and producer.
    """

    options: tuple[tuple[PlannedSublayer, ...], ...]

    @classmethod
    def of(cls, trained: Sequence[PlannedSublayer], candidates: Sequence[PlannedSublayer]) -> "Candidates":
        """Return the candidates that each place can take.

        Identity goes everywhere. A sublayer goes where it takes the old weights, by
        :func:`~lazyformer_fairseq.training.warm_start.start.likeness`. One that reads and hands on nothing, such as
        ``f``, may also replace an attention, and adds nothing before it learns.
        """
        options = []
        for sublayer in trained:
            old = replace(sublayer, consumers=(), producer=None)
            options.append((old, *(new for new in candidates if _can_become(old, new))))
        return cls(tuple(options))

    @cached_property
    def original(self) -> ByPlace:
        """The trained model's pattern."""
        return tuple(options[0].text for options in self.options)

    @cached_property
    def sublayers(self) -> dict[str, PlannedSublayer]:
        """All sublayers that may stand somewhere, by text, without identity."""
        return {each.text: each for options in self.options for each in options if not each.kind.is_identity}

    @cached_property
    def by_text(self) -> tuple[dict[str, PlannedSublayer], ...]:
        """The options of each place by their text."""
        return tuple({each.text: each for each in options} for options in self.options)

    def kept(self, by_place: ByPlace) -> Iterator[tuple[int, PlannedSublayer]]:
        """Yield the sublayers that stay, with their places."""
        for place, text in enumerate(by_place):
            planned = self.by_text[place][text]
            if not planned.kind.is_identity:
                yield place, planned

    def pattern(self, by_place: ByPlace) -> str:
        """Return a pattern written out, without what goes."""
        return "".join(planned.text for _, planned in self.kept(by_place))

    def origins(self, by_place: ByPlace) -> list[str]:
        """Return for each sublayer of a pattern the old one that it starts from, as ``--from-sublayers`` takes them."""
        origins = []
        for place, planned in self.kept(by_place):
            if likeness(self.options[place][0], planned):
                origins.append(str(place))
            else:
                origins.append(NONE)
        return origins

    def is_possible(self, by_place: ByPlace) -> bool:
        """Return whether it makes an encoder: it is not empty, and each consumer has what it reads below it."""
        return is_possible(self.pattern(by_place), ENCODER)

    def placed(self, by_place: ByPlace) -> list[Placed]:
        """Return one sublayer for each place of a possible pattern, those that go among them."""
        kept = list(self.kept(by_place))
        read_from = places_read([planned for _, planned in kept])
        producers = {}
        for (place, _), at in zip(kept, read_from, strict=True):
            if at is not None:
                producer, _ = kept[at]
                producers[place] = producer
        return [Placed(place, text, producers.get(place)) for place, text in enumerate(by_place)]


def _can_become(old: PlannedSublayer, new: PlannedSublayer) -> bool:
    if old.kind.is_identity or old.text == new.text:
        return False
    if new.kind.is_identity or likeness(old, new):
        return True
    attends = bool(old.kind.hands_on or old.kind.reads)
    return attends and not (new.kind.hands_on or new.kind.reads) and can_start_fresh(new)


def default_candidates(trained: Sequence[PlannedSublayer], longest: int) -> list[PlannedSublayer]:
    """Return every kind that takes the weights of one of these sublayers, with windows where it has them, and identity.

    Args:
        trained: the sublayers.
        longest: tokens that the model reads; windows are a sixteenth, an eighth and a quarter of it to either side.
    """
    windows = dict.fromkeys(max(1, longest // share) for share in WINDOW_SHARES)
    found = []
    for kind in kinds():
        plain = PlannedSublayer(kind)
        if ENCODER in kind.modules and (kind.is_identity or any(likeness(old, plain) for old in trained)):
            found.append(plain)
            if kind.setting(WINDOW):
                found += [replace(plain, settings=((WINDOW, window),)) for window in windows]
    return found


def read_encoder_candidates(words: Sequence[str]) -> list[PlannedSublayer]:
    """Read candidates as written in a pattern, or by name, each once.

    Raises:
        UserError: one is no sublayer, or not for encoders.
    """
    found = read_sublayers(words)
    for candidate in found:
        if ENCODER not in candidate.kind.modules:
            raise UserError(f"--candidates: {candidate.text}: {candidate.kind.name} is not for encoders")
    return found
