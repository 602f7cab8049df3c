"""NaN, Inf and loss spikes in real runs: the update is skipped as if it had not been made."""

import re
from unittest import mock

import pytest
import torch
from fairseq.logging import progress_bar
from fairseq_plugin.reliability.damage import WEIGHT, DamagedRun
from helpers import write_toy_glue
from test_pretraining import assert_equal_state

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.criterions.language_modeling import CausalLMCriterion, MaskedLMAccuracyCriterion
from lazyformer_fairseq.fairseq_plugin.reliability import options as reliability_options
from lazyformer_fairseq.finetuning.texts import GlueCriterion

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4"
TINY = f"{TINY} --disable-validation"


def only(kind, *calls):
    return lambda call: kind if call in calls else None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("nan gradient", "--clip-norm 1"),
        pytest.param("nan gradient", "--update-freq 2", marks=pytest.mark.slow),
        pytest.param("inf gradient", "--bf16 --clip-norm 1", marks=pytest.mark.slow),
        pytest.param("inf loss", "--clip-norm 0", marks=pytest.mark.slow),
        (torch.nan, "--bf16 --update-freq 2"),
    ],
)
def test_a_bad_update_is_skipped_as_if_it_had_not_been_made(data_folder, tmp_path, fairseq_train, kind, options):
    with DamagedRun(only(kind, 3)) as run:
        state = fairseq_train(data_folder, f"{TINY} --max-update 6 {options}", tmp_path / "run")
    assert len(run.updates) == 6
    for call, update in enumerate(run.updates):
        assert update.after["updates"] == call + 1  # the skipped one counts too: the schedule goes on
        if call == 3:
            for part in ("model", "optimizer"):
                assert_equal_state(update.after[part], update.before[part], part)
        else:
            assert not torch.equal(update.after["model"][WEIGHT], update.before["model"][WEIGHT])
    assert_finite(state)
    assert state["extra_state"]["bad_updates"]["skipped"] == 1
    assert not (tmp_path / "run" / "crash.pt").exists()  # fairseq's answer to NaN


def assert_finite(state):
    weights = state["model"].values()
    moments = [value for moment in state["last_optimizer_state"]["state"].values() for value in moment.values()]
    assert all(tensor.isfinite().all() for tensor in [*weights, *moments])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_the_next_update_in_half_precision_is_as_large_as_in_full(data_folder, tmp_path, fairseq_train, precision):
    """What gradients are to be multiplied by is kept apart from them there, and must go with a skipped one."""
    options = f"{TINY} --max-update 5 --dropout 0 --adam-betas '(0.9,0.999)'"
    norms = []
    for name, more in (("full", ""), ("half", precision)):
        with DamagedRun(only("inf loss", 3)) as run:
            fairseq_train(data_folder, f"{options} {more}", tmp_path / name)
        moments = [state["optimizer"][0]["exp_avg"] for state in (run.updates[4].before, run.updates[4].after)]
        norms.append((moments[1] - 0.9 * moments[0]).norm())
    assert 0.8 < norms[1] / norms[0] < 1.25


def test_a_bad_update_leaves_the_moving_average_alone(data_folder, tmp_path, fairseq_train):
    with DamagedRun(only("nan gradient", 3)) as run:
        fairseq_train(data_folder, f"{TINY} --max-update 5 --store-ema --ema-decay 0.5", tmp_path / "run")
    moved = [not torch.equal(update.after["ema"][WEIGHT], update.before["ema"][WEIGHT]) for update in run.updates]
    assert moved == [True, True, True, False, True]


def test_a_spike_is_a_multiple_of_the_recent_median(data_folder, tmp_path, fairseq_train):
    kinds = {22: 1.9, 24: 4.0, 26: 4.0}.get
    with DamagedRun(kinds) as run:
        state = fairseq_train(data_folder, f"{TINY} --max-update 30 --loss-spike 2", tmp_path / "run")
    assert skipped(run) == [24, 26]
    assert state["extra_state"]["bad_updates"]["skipped"] == 2
    assert max(state["extra_state"]["bad_updates"]["losses"]) < 2 * min(state["extra_state"]["bad_updates"]["losses"])


def skipped(run: DamagedRun) -> list[int]:
    states = [(update.after["model"][run.weight], update.before["model"][run.weight]) for update in run.updates]
    unmoved = [torch.equal(after, before) for after, before in states]
    return [call for call, stays in enumerate(unmoved) if stays]


def test_an_overflow_of_the_loss_scaler_is_not_counted(data_folder, tmp_path, fairseq_train):
    with DamagedRun(only(None)) as run:
        state = fairseq_train(data_folder, f"{TINY} --max-update 4 --fp16 --fp16-init-scale 1048576", tmp_path / "run")
    overflows = skipped(run)
    assert overflows and overflows == list(range(len(overflows)))
    assert [update.after["updates"] for update in run.updates] == [0] * len(overflows) + [1, 2, 3, 4]
    assert state["last_optimizer_state"]["loss_scale"] == 1048576 / 2 ** len(overflows)
    assert state["extra_state"]["bad_updates"]["skipped"] == 0


@pytest.mark.slow
def test_nan_at_the_smallest_loss_scale_is_counted(data_folder, tmp_path, fairseq_train):
    options = f"{TINY} --max-update 6 --fp16 --fp16-init-scale 2 --min-loss-scale 0.9 --fp16-scale-window 1000"
    with DamagedRun(only("nan gradient", 2, 3, 4)) as run:  # 2: the scale goes from 2 to 1; 3, 4: it can go no lower
        state = fairseq_train(data_folder, options, tmp_path / "run")
    assert [update.after["updates"] for update in run.updates] == [1, 2, 2, 3, 4, 5, 6]
    assert skipped(run) == [2, 3, 4]
    assert state["extra_state"]["bad_updates"]["skipped"] == 2
    assert_finite(state)


@pytest.mark.slow
def test_counts_reach_the_progress_output_tensorboard_and_wandb(
    data_folder, tmp_path, fairseq_train, caplog, monkeypatch
):
    tensorboard, wandb = mock.MagicMock(), mock.MagicMock()
    monkeypatch.setattr(reliability_options, "LOGS_NEED", {})  # as if both were installed
    options = f"{TINY} --max-update 8 --log-interval 2 --tensorboard-logdir {tmp_path / 'tb'} --wandb-project any"
    with (
        mock.patch.object(progress_bar, "SummaryWriter", tensorboard),
        mock.patch.object(progress_bar, "wandb", wandb),
        mock.patch.dict(progress_bar._tensorboard_writers, clear=True),
        caplog.at_level("INFO"),
        DamagedRun(only("nan gradient", 2, 4)),
    ):
        fairseq_train(data_folder, options, tmp_path / "run")
    assert re.search(r"num_updates 8 .*\| skipped 2 \| rollbacks 0", caplog.text)
    scalars = [call.args for call in tensorboard.return_value.add_scalar.call_args_list]
    assert [(value, step) for name, value, step in scalars if name == "skipped"][:3] == [(0, 2), (1, 4), (2, 6)]
    logged = [call.args[0] for call in wandb.log.call_args_list]
    assert {"train_inner/skipped": 2} in logged and {"train_inner/rollbacks": 0} in logged


def test_counts_and_history_outlive_the_process(data_folder, tmp_path, fairseq_train):
    options = f"{TINY} --loss-spike 2 --save-interval-updates 25"
    with DamagedRun(only("nan gradient", 2)):
        fairseq_train(data_folder, f"{options} --max-update 25", tmp_path / "run")
    with DamagedRun(only(4.0, 1)) as resumed:  # a spike is known for one at once
        state = fairseq_train(data_folder, f"{options} --max-update 30", tmp_path / "run")
    assert [update.after["updates"] for update in resumed.updates] == [26, 27, 28, 29, 30]
    assert skipped(resumed) == [1]
    assert state["extra_state"]["bad_updates"]["skipped"] == 2


@pytest.mark.slow
def test_fine_tuning_skips_too(tmp_path, data_folder, fairseq_train):
    glue = write_toy_glue(tmp_path / "glue")
    options = (
        "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion glue --batch-size 16 --max-update 5 "
        f"--tokenizer-folder {data_folder / 'tokenizer'} --disable-validation"
    )
    with DamagedRun(only("nan gradient", 2), GlueCriterion) as run:
        state = fairseq_train(glue / "CoLA", options, tmp_path / "run", task="glue")
    assert skipped(run) == [2]
    assert_finite(state)


@pytest.mark.slow
def test_a_criterion_that_logs_no_loss_is_guarded_by_its_gradient(data_folder, tmp_path, fairseq_train):
    forward = MaskedLMAccuracyCriterion.forward

    def silent_forward(*args, **kwargs):
        loss, sample_size, log = forward(*args, **kwargs)
        return loss, sample_size, {name: value for name, value in log.items() if name != "loss"}

    with mock.patch.object(MaskedLMAccuracyCriterion, "forward", silent_forward):
        with DamagedRun(only("nan gradient", 2), damages_loss=False) as run:
            fairseq_train(data_folder, f"{TINY} --max-update 4", tmp_path / "run")
        assert skipped(run) == [2]
        with pytest.raises(UserError, match="--loss-spike: this --criterion logs no loss"):
            fairseq_train(data_folder, f"{TINY} --max-update 1 --loss-spike 2", tmp_path / "spike")


@pytest.mark.slow
def test_no_nan_stays_in_the_memory_of_streams(lm_data, tmp_path, fairseq_train):
    options = (
        "--arch par_transformer_tiny --sublayer-pattern sfsf --adaptive-softmax-cutoff 20,40 --mem-len 9 "
        "--criterion causal_lm --batch-size 16 --disable-validation --max-update 6"
    )
    task = "stream_language_modeling --tgt-len 6"
    with DamagedRun(only("nan activations", 2), CausalLMCriterion) as run:
        fairseq_train(lm_data, options, tmp_path / "run", task=task)
    assert skipped(run) == [2]


@pytest.mark.parametrize("option", ["--loss-spike 0.5", "--max-skipped-updates 0", "--max-rollbacks -1"])
def test_impossible_options_are_named(data_folder, tmp_path, fairseq_train, option):
    with pytest.raises(UserError, match=option):
        fairseq_train(data_folder, f"{TINY} --max-update 1 {option}", tmp_path / "run")
