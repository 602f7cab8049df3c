"""The schedule of NVIDIA's BERT; test_linear_warmup.py has what it shares with the other one."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim.nvlamb import NvLamb, NvLambConfig
from lazyformer_fairseq.fairseq_plugin.optim.polynomial_warmup import PolynomialWarmupSchedule


def schedule_of(peak=6e-3, max_update=0, max_epoch=0, warmup_ratio=0.2843, power=0.5) -> PolynomialWarmupSchedule:
    lamb = {**vars(NvLambConfig()), "lr": [peak]}
    optimizer = NvLamb(SimpleNamespace(**lamb), [torch.nn.Parameter(torch.zeros(2, 2))])
    options = {"max_update": max_update, "max_epoch": max_epoch, "warmup_ratio": warmup_ratio, "power": power}
    return PolynomialWarmupSchedule(OmegaConf.create({"lr": [peak], **options}), optimizer)


def rates(schedule: PolynomialWarmupSchedule, updates: int) -> list[float]:
    return [schedule.step_update(done) for done in range(updates)]


def nvidias_rates(peak: float, warmup: float, total: int, degree: float) -> list[float]:
    """PolyWarmUpScheduler (DeepLearningExamples, PyTorch/LanguageModeling/BERT/schedulers.py).

    It is stepped before the optimizer, so that its count is 1 in the first update.
    """
    found = []
    for count in range(1, total + 1):
        progress = count / total
        found.append(peak * progress / warmup if progress < warmup else peak * (1 - progress) ** degree)
    return found


@pytest.mark.parametrize(
    ("peak", "warmup_ratio", "total", "drop"), [(6e-3, 0.2843, 7038, 0.846), (4e-3, 0.128, 1563, 0.934)]
)
def test_both_phases_of_nvidias_bert(peak, warmup_ratio, total, drop):
    found = rates(schedule_of(peak, max_update=total, warmup_ratio=warmup_ratio), total)
    assert found == pytest.approx(nvidias_rates(peak, warmup_ratio, total, 0.5))
    highest = found.index(max(found))
    assert found[highest] == pytest.approx(peak, rel=2e-3)
    assert found[highest + 1] == pytest.approx(drop * peak, rel=1e-3)
    assert found[-1] == 0


@pytest.mark.parametrize(("warmup_ratio", "power"), [(0, 0.5), (0.5, 1), (1, 2), (0.3, 3)])
def test_other_shares_and_powers(warmup_ratio, power):
    found = rates(schedule_of(max_update=10, warmup_ratio=warmup_ratio, power=power), 12)
    assert found == pytest.approx([*nvidias_rates(6e-3, warmup_ratio, 10, power), 0, 0])


def test_epochs_give_the_same_rates_as_updates_and_a_resumed_run_keeps_them():
    schedule = schedule_of(max_epoch=4)
    schedule.set_updates_per_epoch(5)
    assert rates(schedule, 20) == pytest.approx(rates(schedule_of(max_update=20), 20))
    resumed = schedule_of(max_epoch=4)
    resumed.load_state_dict(schedule.state_dict())
    resumed.set_updates_per_epoch(99)
    assert rates(resumed, 20) == rates(schedule, 20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "--lr-scheduler polynomial_warmup needs --max-update or --max-epoch"),
        ({"max_update": 5, "warmup_ratio": 1.5}, "--warmup-ratio 1.5"),
        ({"max_update": 5, "power": 0.0}, "--power 0.0: must be above 0"),
    ],
)
def test_impossible_schedules_are_user_errors(options, words):
    with pytest.raises(UserError, match=words):
        schedule_of(**options)
