"""Progressive replacement: in training, a network's sublayers take the places of older ones bit by bit.

Module replacing of BERT-of-Theseus (Xu et al., 2020, section 3.1): in each update every new sublayer stands in its
place with a probability that grows to 1, else the old one does, frozen. Ours is the order, from the top down.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import numpy as np
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import KEYS_AND_VALUES

UPPER_FIRST, TOGETHER = "upper-first", "together"


class Slot(NamedTuple):
    """A place of the mixed network: numbers of the new sublayer and of the old one, None where there is none."""

    new: Optional[int]
    old: Optional[int]


def slots_of(sources: Sequence[Optional[int]], old: int) -> list[Slot]:
    """The places of both networks in one order.

    Args:
        sources: for each new sublayer the number of the old one that it came from, or None.
        old: how many old sublayers there were; those that nobody came from have places of their own.

    Raises:
        UserError: the new sublayers do not stand in the order of the old ones.
    """
    slots, reached = [], 0
    for new, source in enumerate(sources):
        if source is None:
            slots.append(Slot(new, None))
            continue
        if not reached <= source < old:
            raise UserError(
                f"new sublayer {new} comes from old sublayer {source}, out of order or twice: nothing can be replaced "
                "progressively there; leave --replace-progressively out"
            )
        slots += [*(Slot(None, left_out) for left_out in range(reached, source)), Slot(new, source)]
        reached = source + 1
    return [*slots, *(Slot(None, left_out) for left_out in range(reached, old))]


@dataclass(frozen=True)
class Schedule:
    """How probable each new sublayer is.

    The rate r grows linearly from `start` at update 0 to 1 at update `until` (BERT-of-Theseus, section 3.3). Of n
    changing places the i-th from the top, 0 to n - 1, is new with probability r together, and upper first with
    2 r - i / (n - 1), between 0 and 1: the top one is certain when half of the way is gone, and the lowest begins then.

    Args:
        until: updates after which only new ones are left, 1 or more.
        start: the rate at first, from 0 to 1.
        order: UPPER_FIRST or TOGETHER.
    """

    until: int
    start: float = 0.0
    order: str = UPPER_FIRST

    def probabilities(self, updates: int, places: int) -> np.ndarray:
        """(places,), the lowest place first, before the update after `updates`."""
        rate = 1 - (1 - self.start) * max(0, 1 - updates / self.until)
        if self.order == TOGETHER or places < 2:
            return np.full(places, rate)
        from_top = np.arange(places)[::-1] / (places - 1)
        return np.clip(2 * rate - from_top, 0, 1)


class Replacement:
    """Which sublayers a network trains with; knows old ones that no checkpoint of the network holds.

    All processes of a run draw the same, and a resumed run draws what it would have drawn.

    Args:
        new, old: sublayers of both networks. The old ones are frozen, and have no dropout.
        plans: of both networks.
        sources: as for :func:`slots_of`.
        schedule: when.
        seed: of the draws.

    Raises:
        UserError: as :func:`slots_of`, or where an old sublayer cannot stand in a new one's place.
    """

    def __init__(
        self,
        new: Sequence[nn.Module],
        old: Sequence[nn.Module],
        plans: tuple[Sequence[PlannedSublayer], Sequence[PlannedSublayer]],
        sources: Sequence[Optional[int]],
        schedule: Schedule,
        seed: int,
    ):
        self.new, self.schedule, self.seed = new, schedule, seed
        self.slots = slots_of(sources, len(old))
        plan_of_new, plan_of_old = plans
        self.changing = [slot for slot in self.slots if _changes(slot, plan_of_new, plan_of_old)]
        _refuse_consumers_without_producer(self.slots, set(self.changing), plan_of_new, plan_of_old)
        self.stand_ins: dict[Slot, _StandIn] = {}
        for slot in self.changing:
            if slot.old is not None:
                planned = None if slot.new is None else plan_of_new[slot.new]
                self.stand_ins[slot] = _StandIn(old[slot.old], planned, None if slot.new is None else new[slot.new])

    def probabilities(self, updates: int) -> np.ndarray:
        """Of the changing places, the lowest first."""
        return self.schedule.probabilities(updates, len(self.changing))

    def drawn(self, updates: int) -> dict[Slot, bool]:
        """Of the changing places, whether the new sublayer has taken it for the update after `updates`."""
        numbers = np.random.default_rng((self.seed, updates)).random(len(self.changing))
        return dict(zip(self.changing, (numbers < self.probabilities(updates)).tolist(), strict=True))

    def is_over(self, updates: int) -> bool:
        """Whether all places are the new sublayers' from now on."""
        return bool((self.probabilities(updates) >= 1).all())

    def mixed(self, updates: int) -> list[Any]:
        """The sublayers of the update after `updates`, in order."""
        drawn = self.drawn(updates)
        sublayers = []
        for slot in self.slots:
            is_new = drawn.get(slot, True)
            if is_new and slot.new is not None:
                sublayers.append(self.new[slot.new])
            elif not is_new and slot.old is not None:
                sublayers.append(self.stand_ins[slot])
        return sublayers


def on_eager(shared: Context) -> Context:
    """The same pass with each distribution written out: those that share work in a block expect all consumers."""
    return shared._replace(back_end=lambda consumers, settings: "eager")


class _StandIn:
    """An old sublayer in a new one's place: it hands on what the new one would, and nothing else.

    Args:
        sublayer: the old one.
        planned, new: the new one, None where nothing comes after the old one.

    Raises:
        UserError: what reads the one would not understand the other.
    """

    def __init__(self, sublayer: nn.Module, planned: Optional[PlannedSublayer], new: Optional[nn.Module]):
        self.sublayer = sublayer
        self.hands_on = frozenset() if planned is None else frozenset(planned.kind.hands_on)
        if planned is None or not planned.consumers:
            return
        for each in (sublayer, new):
            if len(getattr(getattr(each, "inner", None), "value_makers", ())):
                raise UserError(
                    f"{planned.text}: the sublayers that read it make values for its kind of attention alone, so that "
                    "no other kind can take turns with it; leave --replace-progressively out"
                )
        if KEYS_AND_VALUES in planned.consumers:
            sublayer.inner.is_key_producer = True

    def __call__(
        self, x_BTC: Tensor, below: SharedState, shared: Context, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, Mapping[str, Any]]:
        x_BTC, handed_on = self.sublayer(x_BTC, below, shared, memory_BMC)
        return x_BTC, {name: what for name, what in handed_on.items() if name in self.hands_on}


def _changes(slot: Slot, new: Sequence[PlannedSublayer], old: Sequence[PlannedSublayer]) -> bool:
    """Whether old and new take turns. Not where sublayers above would miss what only the new one can hand on."""
    if slot.new is None:
        return True
    read = set(new[slot.new].consumers)
    if slot.old is None:
        return not read
    return new[slot.new].text != old[slot.old].text and read <= set(old[slot.old].kind.hands_on)


def _refuse_consumers_without_producer(
    slots: Sequence[Slot], changing: Set[Slot], new: Sequence[PlannedSublayer], old: Sequence[PlannedSublayer]
) -> None:
    """Raises a UserError where an old sublayer reads what, in some draw, nothing below it hands on."""
    given: set[str] = set()
    for slot in slots:
        if slot in changing and slot.old is not None:
            planned = old[slot.old]
            if planned.kind.reads is not None and planned.kind.reads not in given:
                raise UserError(
                    f"{planned.text}, sublayer {slot.old} of the original, could not stand in: nothing below it in the "
                    f"new pattern always hands on {planned.kind.reads}; leave --replace-progressively out"
                )
        if slot.new is None:
            continue
        hands_on = set(new[slot.new].kind.hands_on)
        given |= hands_on & set(old[slot.old].kind.hands_on) if slot in changing and slot.old is not None else (
            set() if slot in changing else hands_on)  # fmt: skip
