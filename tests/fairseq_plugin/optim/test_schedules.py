"""Both schedules: the rate of each update, by updates and by epochs, from its start and resumed."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim.optimizers import FusedAdam, FusedAdamConfig
from lazyformer_fairseq.fairseq_plugin.optim.schedules import (
    LinearWarmupSchedule,
    PolynomialWarmupSchedule,
    WarmupSchedule,
)


def schedule_of(kind: type, lr: float = 0.5, **given) -> WarmupSchedule:
    adam = SimpleNamespace(**{**vars(FusedAdamConfig()), "lr": [lr]})
    optimizer = FusedAdam(adam, [torch.nn.Parameter(torch.zeros(2, 2))])
    options = {"max_update": 0, "max_epoch": 0, "warmup_ratio": 0.1, "power": 0.5, **given}
    return kind(OmegaConf.create({"lr": [lr], **options}), optimizer)


def rates(schedule: WarmupSchedule, updates: int) -> list[float]:
    return [schedule.step_update(done) for done in range(updates)]


def test_the_rate_grows_linearly_and_falls_linearly_to_zero():
    found = rates(schedule_of(LinearWarmupSchedule, max_update=20), 22)
    assert found == pytest.approx([0.25, 0.5, *(0.5 * left / 18 for left in range(18, -1, -1)), 0])  # 2 of warm-up
    assert rates(schedule_of(LinearWarmupSchedule, max_update=1), 3) == [0.5, 0, 0]
    for ratio, expected in ((0, range(10, 0, -1)), (1, range(1, 11))):
        found = rates(schedule_of(LinearWarmupSchedule, max_update=10, warmup_ratio=ratio), 10)
        assert found == pytest.approx([0.05 * share for share in expected])


@pytest.mark.parametrize("kind", [LinearWarmupSchedule, PolynomialWarmupSchedule])
def test_epochs_give_the_same_rates_as_updates_and_a_resumed_run_keeps_them(kind):
    schedule = schedule_of(kind, max_epoch=4)
    assert schedule.total_updates is None
    schedule.set_updates_per_epoch(5)
    assert rates(schedule, 20) == pytest.approx(rates(schedule_of(kind, max_update=20), 20))
    resumed = schedule_of(kind, max_epoch=4)
    resumed.load_state_dict(schedule.state_dict())
    resumed.set_updates_per_epoch(99)
    assert rates(resumed, 20) == rates(schedule, 20)


def nvidias_rates(peak: float, warmup: float, total: int, degree: float) -> list[float]:
    """PolyWarmUpScheduler (DeepLearningExamples, PyTorch/LanguageModeling/BERT/schedulers.py).

    It is stepped before the optimizer, so that its count is 1 in the first update.
    """
    shares = [count / total for count in range(1, total + 1)]
    return [peak * share / warmup if share < warmup else peak * (1 - share) ** degree for share in shares]


@pytest.mark.parametrize(
    ("peak", "warmup_ratio", "total", "drop"), [(6e-3, 0.2843, 7038, 0.846), (4e-3, 0.128, 1563, 0.934)]
)
def test_both_phases_of_nvidias_bert_and_other_shares_and_powers(peak, warmup_ratio, total, drop):
    found = rates(schedule_of(PolynomialWarmupSchedule, peak, max_update=total, warmup_ratio=warmup_ratio), total)
    assert found == pytest.approx(nvidias_rates(peak, warmup_ratio, total, 0.5))
    highest = found.index(max(found))
    assert found[highest : highest + 2] == pytest.approx([peak, drop * peak], rel=2e-3)
    assert found[-1] == 0
    for share, power in ((0, 0.5), (0.5, 1), (1, 2), (0.3, 3)):
        schedule = schedule_of(PolynomialWarmupSchedule, peak, max_update=10, warmup_ratio=share, power=power)
        assert rates(schedule, 12) == pytest.approx([*nvidias_rates(peak, share, 10, power), 0, 0])


def test_impossible_schedules_are_user_errors():
    both = (LinearWarmupSchedule, PolynomialWarmupSchedule)
    for kinds, options, words in (
        (both, {}, "--lr-scheduler (linear|polynomial)_warmup needs --max-update or --max-epoch"),
        (both, {"max_update": 5, "warmup_ratio": 1.5}, "--warmup-ratio 1.5"),
        (both, {"max_update": 5, "warmup_ratio": -1}, "--warmup-ratio -1"),
        (both[1:], {"max_update": 5, "power": 0.0}, "--power 0.0: must be above 0"),
    ):
        for kind in kinds:
            with pytest.raises(UserError, match=words):
                schedule_of(kind, **options)
