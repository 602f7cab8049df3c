"""The schedules: the rate of each update, by updates and by epochs, from its start, resumed, and as a branch."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_equal_state, message_of, mostly_slow, stopped_at, updates_of
from omegaconf import OmegaConf

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim.optimizers import FusedAdam, FusedAdamConfig
from lazyformer_fairseq.fairseq_plugin.optim.schedules import (
    LinearWarmupSchedule,
    PolynomialWarmupSchedule,
    WSDSchedule,
)
from lazyformer_fairseq.training.schedules import WarmupSchedule

OF_WSD = {"warmup_updates": 0, "decay": "1-sqrt", "decay_share": 0.1, "decay_from": None}


def schedule_of(schedule_class: type, lr: float = 0.5, **given) -> WarmupSchedule:
    adam = SimpleNamespace(**{**vars(FusedAdamConfig()), "lr": [lr]})
    optimizer = FusedAdam(adam, [torch.nn.Parameter(torch.zeros(2, 2))])
    options = {"max_update": 0, "max_epoch": 0, "warmup_ratio": 0.1, "power": 0.5, **OF_WSD, **given}
    return schedule_class(OmegaConf.create({"lr": [lr], **options}), optimizer)


def rates(schedule: WarmupSchedule, updates: int) -> list[float]:
    return [schedule.step_update(done) for done in range(updates)]


def test_the_rate_grows_linearly_and_falls_linearly_to_zero():
    found = rates(schedule_of(LinearWarmupSchedule, max_update=20), 22)
    assert found == pytest.approx([0.25, 0.5, *(0.5 * left / 18 for left in range(18, -1, -1)), 0])  # 2 of warm-up
    assert rates(schedule_of(LinearWarmupSchedule, max_update=1), 3) == [0.5, 0, 0]
    for ratio, expected in ((0, range(10, 0, -1)), (1, range(1, 11))):
        found = rates(schedule_of(LinearWarmupSchedule, max_update=10, warmup_ratio=ratio), 10)
        assert found == pytest.approx([0.05 * share for share in expected])


@pytest.mark.parametrize("schedule_class", [LinearWarmupSchedule, PolynomialWarmupSchedule])
def test_epochs_give_the_same_rates_as_updates_and_a_resumed_run_keeps_them(schedule_class):
    schedule = schedule_of(schedule_class, max_epoch=4)
    assert not schedule.knows_total
    schedule.set_updates_per_epoch(5)
    assert rates(schedule, 20) == pytest.approx(rates(schedule_of(schedule_class, max_update=20), 20))
    resumed = schedule_of(schedule_class, max_epoch=4)
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
    for classes, options, words in (
        (both, {}, "--lr-scheduler (linear|polynomial)_warmup requires --max-update or --max-epoch"),
        (both, {"max_update": 5, "warmup_ratio": 1.5}, "--warmup-ratio 1.5"),
        (both, {"max_update": 5, "warmup_ratio": -1}, "--warmup-ratio -1"),
        (both[1:], {"max_update": 5, "power": 0.0}, "--power 0.0: must be greater than 0"),
    ):
        for schedule_class in classes:
            with pytest.raises(UserError, match=words):
                schedule_of(schedule_class, **options)


# --- warm-up, constant, decay


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"decay": "linear", "decay_share": 0.4}, [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        ({"decay_share": 0.4}, [1, 1, 1, 1, 1, 1, 1, *(1 - math.sqrt(x / 4) for x in (1, 2, 3)), 0, 0]),
        ({"decay_share": 0.11}, [1] * 9 + [1 - math.sqrt(0.5), 0, 0]),  # an update that is begun counts whole
        ({"decay_share": 0.0}, [1] * 12),
        (
            {"decay_share": 0.5, "warmup_updates": 5},
            [0.2, 0.4, 0.6, 0.8, 1, 1, *(1 - math.sqrt(x / 5) for x in range(1, 5)), 0],
        ),
        ({"warmup_ratio": 0.2}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]),
        ({"decay": "linear", "decay_share": 1.0, "warmup_ratio": 0.0}, [0.1 * left for left in range(10, -1, -1)]),
    ],
)
def test_the_rate_is_constant_between_warm_up_and_decay(options, expected):
    found = rates(schedule_of(WSDSchedule, max_update=10, **options), len(expected))
    assert found == pytest.approx([0.5 * share for share in expected], abs=1e-12)


def saved_after(updates: int, **options) -> dict:
    schedule = schedule_of(WSDSchedule, **options)
    schedule.step_update(updates)
    return schedule.state_dict()


def test_a_branch_keeps_the_warm_up_of_the_run_that_it_leaves():
    branch = schedule_of(WSDSchedule, max_update=20, warmup_ratio=0.5)
    branch.load_state_dict(saved_after(3, max_update=100, warmup_ratio=0.05))
    assert rates(branch, 8)[3:] == [0.4, 0.5, 0.5, 0.5, 0.5]


def test_a_branch_with_another_peak_is_warned_of(caplog):
    state = saved_after(3, max_update=100)
    schedule_of(WSDSchedule, max_update=20, decay_from="a.pt").load_state_dict(state)
    assert "peak" not in caplog.text
    schedule_of(WSDSchedule, lr=0.25, max_update=20, decay_from="a.pt").load_state_dict(state)
    assert "--lr 0.25: the 3 updates of --decay-from a.pt used a peak learning rate of 0.5" in caplog.text


@pytest.mark.parametrize(
    ("made", "theirs", "ours", "words"),
    [
        (95, {"max_update": 100}, {"max_update": 100}, None),  # resumed amid its decay
        (90, {"max_update": 100}, {"max_update": 120, "decay_share": 0.25}, None),
        (
            91,
            {"max_update": 100},
            {"max_update": 120},
            "was saved after 91 updates, but the decay set by its own run begins after 90",
        ),
        (91, {"max_update": 100}, {"max_update": 100, "decay": "linear"}, "set by its own run begins after 90"),
        (95, {"max_update": 100}, {"max_update": 120, "decay_share": 0.25}, "set by its own run begins after 90"),
        (
            91,
            {"max_update": 200},
            {"max_update": 100},
            "--decay-from a.pt was saved after 91 updates, but the decay set by --max-update 100 with --decay-share "
            "0.1 begins after 90; use an earlier checkpoint, or a larger --max-update",
        ),
        (
            91,
            {"max_update": 200},
            {"max_update": 50},
            "--max-update 50: --decay-from a.pt was saved after 91 updates; use",
        ),
        (
            99,
            {"max_update": 999},
            {"max_update": 100},
            "after update 90, during the 99 updates of --decay-from a.pt's warm-up",
        ),
    ],
)
def test_a_checkpoint_whose_rate_was_another_is_no_start(made, theirs, ours, words):
    state = saved_after(made, **{**theirs, "warmup_updates": 99 if theirs["max_update"] == 999 else 1})
    state |= {"num_updates": 90} if theirs["max_update"] == 999 else {}
    schedule = schedule_of(WSDSchedule, decay_from="a.pt", **ours)
    if words is None:
        return schedule.load_state_dict(state)
    with pytest.raises(UserError) as caught:
        schedule.load_state_dict(state)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "--lr-scheduler wsd requires --max-update to determine when the decay begins"),
        ({"max_epoch": 2}, "--lr-scheduler wsd requires --max-update"),
        ({"max_update": 9, "max_epoch": 2}, "--max-epoch 2: not supported by --lr-scheduler wsd; omit --max-epoch"),
        ({"max_update": 9, "decay_share": 1.5}, "--decay-share 1.5: must be in"),
        ({"max_update": 9, "decay_share": -0.5}, "--decay-share -0.5: must be in"),
        (
            {"max_update": 10, "decay_share": 0.5, "warmup_updates": 6},
            "would begin after update 5, during the 6 updates of warm-up",
        ),
    ],
)
def test_impossible_settings_of_wsd_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        schedule_of(WSDSchedule, **options)


SMALL = "--arch bert_tiny --sublayer-pattern sf --criterion masked_lm_accuracy --batch-size 2 --disable-validation"
BY_WSD = f"{SMALL} --lr-scheduler wsd --warmup-updates 2 --save-interval-updates 1"


@pytest.mark.parametrize("more", mostly_slow(["", "--bf16 --optimizer muon"], ""))
def test_a_branch_equals_the_whole_run_to_the_bit(more, fairseq_train, data_folder, tmp_path, interruptible):
    """Dropout and masks draw by update; the branch is stopped, too, and goes on from its own checkpoint."""
    constant, until_6 = (
        f"{BY_WSD} {more} --max-update 5 --decay-share 0",
        f"{BY_WSD} {more} --max-update 6 --decay-share 0.4",
    )
    fairseq_train(data_folder, constant, tmp_path / "constant")
    whole = fairseq_train(data_folder, until_6, tmp_path / "whole")
    start = next((tmp_path / "constant").glob("checkpoint_*_3.pt"))
    with stopped_at(5):
        fairseq_train(data_folder, f"{until_6} --decay-from {start}", tmp_path / "branch")
    start.rename(tmp_path / "gone.pt")
    branch = fairseq_train(data_folder, f"{until_6} --decay-from {start}", tmp_path / "branch")
    assert updates_of(branch) == updates_of(whole) == 6
    for part in ("model", "last_optimizer_state"):
        assert_equal_state(branch[part], whole[part])
    assert branch["extra_state"]["train_iterator"] == whole["extra_state"]["train_iterator"]
    late = f"--decay-from {tmp_path}/whole/{start.name.replace('_3.pt', '_5.pt')}"
    said = message_of(fairseq_train, data_folder, f"{BY_WSD} {more} --max-update 9 {late}", tmp_path / "late")
    assert said.startswith(f"{late} was saved after 5 updates, but the decay set by its own run begins after 3")


@pytest.mark.slow
def test_branches_of_branches_killed_anywhere_equal_the_whole_run(fairseq_train, data_folder, tmp_path, interruptible):
    """From each checkpoint before the decay, in another way of starting, and with a last checkpoint lost or cut."""
    by_wsd = f"{BY_WSD} --dropout 0.1"

    def train(options: str, folder: str) -> dict:
        return fairseq_train(data_folder, f"{by_wsd} {options}", tmp_path / folder)

    def saved(folder: str, updates: int) -> Path:
        return next((tmp_path / folder).glob(f"checkpoint_*_{updates}.pt"))

    decaying = "--max-update 8 --decay-share 0.5"  # from update 4 on
    whole = train(decaying, "whole")
    train("--max-update 5 --decay-share 0", "constant")
    train(f"--max-update 6 --decay-share 0 --decay-from {saved('constant', 2)}", "longer")
    starts = [saved("constant", 1), saved("constant", 4), saved("longer", 4), saved("whole", 3), saved("whole", 6)]
    for number, start in enumerate(starts):
        found = train(f"{decaying} --decay-from {start}", f"branch_{number}")
        assert_equal_state(found["model"], whole["model"])
        assert_equal_state(found["last_optimizer_state"], whole["last_optimizer_state"])
    once = f"{decaying} --continue-once {saved('constant', 3)}"
    for number, (kill_at, damage) in enumerate([(4, None), (6, None), (7, "cut"), (6, "lost")]):
        with stopped_at(kill_at):
            train(once, f"killed_{number}")
        last = tmp_path / f"killed_{number}" / "checkpoint_last.pt"
        if damage == "cut":
            last.write_bytes(last.read_bytes()[:-100])
        elif damage == "lost":
            last.unlink()
        found = train(once, f"killed_{number}")
        assert_equal_state(found["model"], whole["model"])
        assert_equal_state(found["last_optimizer_state"], whole["last_optimizer_state"])


def test_starts_that_cannot_be_are_refused_in_words(fairseq_train, data_folder, tmp_path):
    for more, words in (
        ("--restore-file other.pt", "--restore-file: not allowed with --decay-from a.pt; omit one of the two"),
        ("--reset-optimizer", "--reset-optimizer: not allowed with --decay-from a.pt"),
        ("", "a.pt: no such checkpoint"),
        (f"--decay-from {tmp_path}/run/a.pt", f"--decay-from {tmp_path}/run/a.pt is in --save-dir, where this run"),
    ):
        options = f"{BY_WSD} --max-update 9 --decay-from a.pt {more}"
        assert message_of(fairseq_train, data_folder, options, tmp_path / "run").startswith(words)
    fairseq_train(data_folder, f"{SMALL} --max-update 1", tmp_path / "linear")
    options = f"{BY_WSD} --max-update 9 --decay-from {tmp_path / 'linear' / 'checkpoint_last.pt'}"
    said = message_of(fairseq_train, data_folder, options, tmp_path / "branch")
    assert "checkpoint_last.pt was not trained with --lr-scheduler wsd" in said
