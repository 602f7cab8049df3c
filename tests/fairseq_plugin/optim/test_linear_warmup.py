from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim.fused_adam import FusedAdam
from lazyformer_fairseq.fairseq_plugin.optim.linear_warmup import LinearWarmupSchedule


def schedule_of(max_update=0, max_epoch=0, warmup_ratio=0.1) -> LinearWarmupSchedule:
    options = {"lr": [0.5], "max_update": max_update, "max_epoch": max_epoch, "warmup_ratio": warmup_ratio}
    adam = {"lr": [0.5], "adam_betas": (0.9, 0.98), "adam_eps": 1e-6, "weight_decay": 0}
    optimizer = FusedAdam(
        SimpleNamespace(**adam, no_decay_bias_and_norm=False), [torch.nn.Parameter(torch.zeros(2, 2))]
    )
    return LinearWarmupSchedule(OmegaConf.create(options), optimizer)


def rates(schedule: LinearWarmupSchedule, updates: int) -> list[float]:
    return [schedule.step_update(done) for done in range(updates)]


def test_the_rate_grows_linearly_and_falls_linearly_to_zero():
    found = rates(schedule_of(max_update=20), 20)
    assert found[:3] == pytest.approx([0.25, 0.5, 0.5])  # updates 1 and 2 are the warm-up of 10%
    steps = [before - after for before, after in pairwise(found[2:])]
    assert steps == pytest.approx([0.5 / 18] * len(steps))
    assert found[-1] == pytest.approx(0.5 / 18)
    assert schedule_of(max_update=20).step_update(20) == 0


def test_epochs_give_the_same_rates_as_updates():
    schedule = schedule_of(max_epoch=4)
    assert schedule.total_updates is None
    schedule.set_updates_per_epoch(5)
    assert rates(schedule, 20) == pytest.approx(rates(schedule_of(max_update=20), 20))


def test_the_smaller_of_epochs_and_updates_counts():
    schedule = schedule_of(max_epoch=4, max_update=1000)
    schedule.set_updates_per_epoch(5)
    assert schedule.total_updates == 20
    schedule = schedule_of(max_epoch=4, max_update=10)
    schedule.set_updates_per_epoch(5)
    assert schedule.total_updates == 10


def test_a_resumed_schedule_keeps_its_length():
    schedule = schedule_of(max_epoch=4)
    schedule.set_updates_per_epoch(5)
    resumed = schedule_of(max_epoch=4)
    resumed.load_state_dict(schedule.state_dict())
    resumed.set_updates_per_epoch(99)
    assert rates(resumed, 20) == rates(schedule, 20)


def test_a_single_update_is_at_the_peak_and_the_rate_stays_zero_after_the_end():
    schedule = schedule_of(max_update=1)
    assert [schedule.step_update(done) for done in range(3)] == [0.5, 0, 0]


@pytest.mark.parametrize("warmup_ratio", [0, 1])
def test_no_warmup_and_nothing_but_warmup(warmup_ratio):
    found = rates(schedule_of(max_update=10, warmup_ratio=warmup_ratio), 10)
    assert found == pytest.approx([0.05 * (n + 1 if warmup_ratio else 10 - n) for n in range(10)])


@pytest.mark.parametrize("options", [{}, {"max_update": 5, "warmup_ratio": 1.5}, {"max_update": 5, "warmup_ratio": -1}])
def test_impossible_schedules_are_user_errors(options):
    with pytest.raises(UserError, match="--max-update or --max-epoch|--warmup-ratio"):
        schedule_of(**options)
