"""Temperature and the end of a search."""

import math

import pytest

from lazyformer_fairseq.search.schedule import Schedule


def test_defaults_are_the_papers_and_fbnets():
    schedule = Schedule()
    assert (schedule.constant_updates, schedule.max_updates, schedule.unchanged_share) == (10_000, 50_000, 0.75)
    assert schedule.temperature == 5.0
    assert schedule.final_temperature == pytest.approx(5 * math.exp(-0.045 * 90), rel=0.01)  # FBNet's 90 epochs


def test_temperature_is_constant_then_decays_exponentially():
    schedule = Schedule(100, 300, 4.0, 1.0)
    assert [schedule.temperature_at(update) for update in (0, 100)] == [4.0, 4.0]
    assert schedule.temperature_at(200) == pytest.approx(2.0)
    assert schedule.temperature_at(300) == pytest.approx(1.0)


def test_a_pattern_that_stays_through_three_quarters_of_a_stage_is_found():
    schedule = Schedule()
    assert not schedule.is_converged(29, 40)
    assert schedule.is_converged(30, 40)


def test_the_first_architecture_update_follows_a_whole_epoch_of_weights():
    assert Schedule(constant_updates=10).first_architecture_update(8) == 16
    assert Schedule(constant_updates=0).first_architecture_update(8) == 8
