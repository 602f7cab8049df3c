"""The possible sublayers at each position of a trained encoder: the present one, and candidates that may replace it.

Positions are indices of the trained model's sublayers. ``by_place`` describes a pattern by the text of the sublayer at
each position; a removed sublayer is represented by identity.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.settings import read_sublayers
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, is_possible, producer_indices
from lazyformer_fairseq.patterns.kinds import ENCODER, kinds
from lazyformer_fairseq.training.warm_start.start import NONE, can_start_fresh, likeness

Positions = tuple[str, ...]
WINDOW = "window"  # a setting that does not change the weights
WINDOW_SHARES = (16, 8, 4)  # windows are the longest input divided by these


class Placed(NamedTuple):
    """A sublayer of a pattern with its position.

    Attributes:
        place: the position in the trained model.
        text: the sublayer's text.
        producer: the position that it reads from; None if it does not read from another sublayer.
    """

    place: int
    text: str
    producer: Optional[int]


@dataclass(frozen=True)
class Candidates:
    """The possible sublayers at each position.

    Attributes:
        options: the possible sublayers at each position, not linked to consumers and producers; the first one is the
            trained model's own.
    """

    options: tuple[tuple[PlannedSublayer, ...], ...]

    @classmethod
    def of(cls, trained: Sequence[PlannedSublayer], candidates: Sequence[PlannedSublayer]) -> "Candidates":
        """Determine the candidates that are possible at each position.

        Identity is possible everywhere. Another sublayer is possible where it can reuse the old weights, according to
        :func:`~lazyformer_fairseq.training.warm_start.start.likeness`. A sublayer that neither reads from others nor
        passes anything on, such as ``f``, may also replace attention; its output is zero until it is trained.

        Args:
            trained: the trained model's sublayers.
            candidates: the sublayers that may replace them.
        """
        options = []
        for sublayer in trained:
            old = replace(sublayer, consumers=(), producer=None)
            options.append((old, *(new for new in candidates if _can_become(old, new))))
        return cls(tuple(options))

    @cached_property
    def original(self) -> Positions:
        """The trained model's pattern."""
        return tuple(options[0].text for options in self.options)

    @cached_property
    def sublayers(self) -> dict[str, PlannedSublayer]:
        """All sublayers that are possible at any position, by text, without identity."""
        return {each.text: each for options in self.options for each in options if not each.kind.is_identity}

    @cached_property
    def by_text(self) -> tuple[dict[str, PlannedSublayer], ...]:
        """The options at each position, by text."""
        return tuple({each.text: each for each in options} for options in self.options)

    def kept(self, by_place: Positions) -> Iterator[tuple[int, PlannedSublayer]]:
        """Yield a pattern's sublayers other than identity, with their positions."""
        for place, text in enumerate(by_place):
            planned = self.by_text[place][text]
            if not planned.kind.is_identity:
                yield place, planned

    def pattern(self, by_place: Positions) -> str:
        """Return the expanded pattern without removed sublayers."""
        return "".join(planned.text for _, planned in self.kept(by_place))

    def origins(self, by_place: Positions) -> list[str]:
        """Return the old sublayer that each sublayer of a pattern starts from, formatted for ``--from-sublayers``."""
        origins = []
        for place, planned in self.kept(by_place):
            if likeness(self.options[place][0], planned):
                origins.append(str(place))
            else:
                origins.append(NONE)
        return origins

    def is_possible(self, by_place: Positions) -> bool:
        """Return whether a pattern is valid for an encoder.

        It must not be empty, and each sublayer that reads from another one must have such a sublayer below it.
        """
        return is_possible(self.pattern(by_place), ENCODER)

    def placed(self, by_place: Positions) -> list[Placed]:
        """Return the sublayers of a valid pattern at all positions, including removed ones."""
        kept = list(self.kept(by_place))
        read_from = producer_indices([planned for _, planned in kept])
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
    """Return identity and every kind that can reuse the weights of a trained sublayer, with and without windows.

    Args:
        trained: the trained model's sublayers.
        longest: the maximum input length; windows are a sixteenth, an eighth and a quarter of it on either side.
    """
    windows = dict.fromkeys(max(1, longest // share) for share in WINDOW_SHARES)
    found = []
    for kind in kinds():
        if ENCODER not in kind.modules:
            continue
        plain = PlannedSublayer(kind)
        if kind.is_identity or any(likeness(old, plain) for old in trained):
            found.append(plain)
            if kind.setting(WINDOW):
                found += [replace(plain, settings=((WINDOW, window),)) for window in windows]
    return found


def read_encoder_candidates(words: Sequence[str]) -> list[PlannedSublayer]:
    """Parse candidates, each written as in a pattern or as the name of a kind, and remove duplicates.

    Raises:
        UserError: a word is not a sublayer, or the sublayer is not for encoders.
    """
    found = read_sublayers(words)
    for candidate in found:
        if ENCODER not in candidate.kind.modules:
            raise UserError(
                f"--candidates {candidate.text}: {candidate.kind.name} is not supported in encoders; omit the candidate"
            )
    return found
