"""Order of old and new sublayers, schedule and draws; what the networks compute is the criterion's test."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.replacement import (
    TOGETHER,
    UPPER_FIRST,
    Replacement,
    Schedule,
    Slot,
    slots_of,
)


def test_sublayers_of_both_networks_stand_in_one_order():
    assert slots_of([0, 1], 2) == [Slot(0, 0), Slot(1, 1)]
    assert slots_of([0, 3, None], 5) == [Slot(0, 0), Slot(None, 1), Slot(None, 2), Slot(1, 3), Slot(2, None),
                                         Slot(None, 4)]  # fmt: skip
    for sources in ([1, 0], [0, 0], [2]):
        with pytest.raises(UserError, match="out of order or twice"):
            slots_of(sources, 2)


@given(
    st.integers(1, 1000), st.floats(0, 1), st.sampled_from([UPPER_FIRST, TOGETHER]), st.integers(1, 9), st.floats(0, 1)
)
def test_probabilities_grow_to_one_and_from_the_top(until, start, order, places, part):
    schedule = Schedule(until, start, order)
    updates = int(part * until)
    now, then = schedule.probabilities(updates, places), schedule.probabilities(updates + 1, places)
    assert now.shape == (places,) and (now >= 0).all() and (now <= then).all() and (np.diff(now) >= 0).all()
    assert (schedule.probabilities(until, places) == 1).all() and (schedule.probabilities(until + 7, places) == 1).all()
    if not start:
        assert (schedule.probabilities(0, places) == 0).all()


def test_the_schedule_by_hand():
    assert Schedule(100).probabilities(25, 3).tolist() == [0, 0, 0.5]
    assert Schedule(100).probabilities(50, 3).tolist() == [0, 0.5, 1]
    assert Schedule(100, 0.5).probabilities(50, 3).tolist() == [0.5, 1, 1]
    assert Schedule(100, 0.5, TOGETHER).probabilities(50, 2).tolist() == [0.75, 0.75]


def test_draws_are_those_of_the_update_and_as_frequent_as_they_should_be():
    old, new = (Encoder(pattern, None, 8, 8, 2, relative_position_buckets=0) for pattern in ("(sf)x3", "sfllll"))
    sources = [0, 1, 2, None, 4, None]
    with pytest.raises(UserError, match="no other|could not stand in|out of order|stand"):
        Replacement(new.sublayers, old.sublayers, (new.plan, old.plan), [0, 1, 4, None, 2, None], Schedule(10), 1)
    made = Replacement(new.sublayers, old.sublayers, (new.plan, old.plan), sources, Schedule(1000, 0, TOGETHER), 1)
    again = Replacement(new.sublayers, old.sublayers, (new.plan, old.plan), sources, Schedule(1000, 0, TOGETHER), 1)
    draws = [made.drawn(update) for update in range(400, 600)]
    assert draws == [again.drawn(update) for update in range(400, 600)]
    shares = np.mean([list(draw.values()) for draw in draws], axis=0)
    assert len(shares) == 6 and (abs(shares - 0.5) < 0.15).all()  # 4 standard deviations


def test_what_reads_values_of_its_own_kind_cannot_take_turns():
    old, new = (
        Encoder(pattern, None, 8, 8, 2, relative_position_buckets=0) for pattern in ("sfsf", "s[window=4,global=1]flf")
    )
    with pytest.raises(UserError, match="make values for its kind of attention alone"):
        Replacement(new.sublayers, old.sublayers, (new.plan, old.plan), range(4), Schedule(10), 1)


def test_an_old_reader_needs_its_giver():
    old, new = (Encoder(pattern, None, 8, 8, 2, relative_position_buckets=0) for pattern in ("sflf", "fsf"))
    with pytest.raises(UserError, match="sublayer 2 of the original, could not stand in"):
        Replacement(new.sublayers, old.sublayers, (new.plan, old.plan), [1, 2, 3], Schedule(10), 1)
