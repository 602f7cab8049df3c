"""NVIDIA's options, and runs by them; test_lamb.py has the numbers, test_optimizers.py what it shares with Adam."""

import apex_stand_in
import pytest
import torch
from fairseq import utils
from fairseq_plugin.optim.test_optimizers import LAMB, build, config, make_parameters, set_gradients

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim.optimizers import NvLamb

SMALL = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4"


def test_weights_without_decay_have_a_ratio_or_take_the_rate_as_it_is():
    bias = make_parameters()[1].detach()
    for without, ratio in ((False, bias.norm() / 3**0.5), (True, 1.0)):
        parameters = make_parameters()
        optimizer = build(
            LAMB, "torch", parameters, no_decay_bias_and_norm=True, no_ratio_without_decay=without, lamb_eps=0
        )
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        torch.testing.assert_close(parameters[1].detach(), bias - 0.1 * ratio)


def test_options_reach_the_optimizer():
    group = build(LAMB, "torch", make_parameters(), max_weight_norm=10.0, no_bias_correction=True).param_groups[0]
    del group["params"]
    assert group == {
        "lr": 0.1, "betas": (0.9, 0.98), "eps": 1e-3, "weight_decay": 0.5, "bias_correction": False,
        "max_weight_norm": 10.0, "ratio_without_decay": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lamb_eps": -1e-6}, "--lamb-eps -1e-06: must be 0 or more"),
        ({"weight_decay": float("nan")}, "--weight-decay nan: must be 0 or more"),
        ({"max_weight_norm": -1}, "--max-weight-norm -1: must be 0 or more"),
    ],
)
def test_impossible_options_are_user_errors(changes, words):
    with pytest.raises(UserError, match=words):
        NvLamb(config(LAMB, **changes), make_parameters())


def test_gradients_are_clipped_once_by_the_norm_of_all():
    """As FusedLAMB does it itself in NVIDIA's BERT: fairseq's clipping before it gives the same numbers."""
    expected, parameters = make_parameters(), make_parameters()
    theirs = apex_stand_in.FusedLAMB(expected, lr=0.1, betas=(0.9, 0.98), eps=1e-3, weight_decay=0.5, max_grad_norm=1)
    ours = build(LAMB, "torch", parameters)
    for update in range(4):
        set_gradients(parameters, update, 10 ** (1 - update))
        for parameter, other in zip(parameters, expected, strict=True):
            other.grad = parameter.grad.clone()
        assert (utils.clip_grad_norm_(expected, 0) > 1) == (update < 2)
        ours.clip_grad_norm(1.0)
        ours.step()
        theirs.step()
    for found, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "precision", ["--bf16", *(pytest.param(each, marks=pytest.mark.slow) for each in ("", "--fp16"))]
)
def test_a_resumed_run_of_fairseq_ends_where_one_without_a_break_does(precision, fairseq_train, data_folder, tmp_path):
    options = f"{SMALL} --optimizer nvlamb --lr 0.01 --clip-norm 1.0 --disable-validation {precision}"
    options += " --lr-scheduler polynomial_warmup --warmup-ratio 0.3 --max-update 4"
    expected = fairseq_train(data_folder, f"{options} --save-interval-updates 2", tmp_path / "whole")
    half = tmp_path / "whole" / "checkpoint_1_2.pt"
    found = fairseq_train(data_folder, f"{options} --restore-file {half}", tmp_path / "resumed")
    assert found["optimizer_history"][-1]["num_updates"] == 4
    assert all(torch.equal(found["model"][name], value) for name, value in expected["model"].items())
    groups = found["last_optimizer_state"]["param_groups"]
    assert [(group["step"], group["lr"]) for group in groups] == [(4, 0.0)]


@pytest.mark.slow
def test_a_small_masked_lm_learns(fairseq_train, data_folder, tmp_path):
    """From the uniform distribution over 160 pieces, 7.3 bits."""
    options = f"{SMALL} --dropout 0 --optimizer nvlamb --lr 0.02 --clip-norm 1.0 --validate-interval-updates 150"
    options += " --lr-scheduler polynomial_warmup --warmup-ratio 0.2843 --max-update 150"
    assert fairseq_train(data_folder, options, tmp_path)["extra_state"]["val_loss"] < 6
