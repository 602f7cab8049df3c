"""The sum of an update's gradients in half precision, beside the same gradients added in double precision."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import train_in_two_processes, train_words

from lazyformer_fairseq.fairseq_plugin.optim.half_precision import EXACT_ENOUGH, FP16Optimizer
from lazyformer_fairseq.fairseq_plugin.optim.optimizers import FusedAdam
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

SHAPES = ((3, 2), (5,), (2, 2))


def config(is_bf16: bool, joined: bool) -> SimpleNamespace:
    scaling = dict(fp16_scale_window=8, fp16_init_scale=4, fp16_scale_tolerance=0.0, threshold_loss_scale=None)
    return SimpleNamespace(
        optimizer=SimpleNamespace(
            _name="fused_adam", lr=[0.1], adam_betas="(0.9, 0.98)", adam_eps=1e-6, weight_decay=0.0,
            no_decay_bias_and_norm=False,
        ),
        common=SimpleNamespace(**scaling, min_loss_scale=1e-4, bf16=is_bf16, fp16_no_flatten_grads=not joined),
        optimization=SimpleNamespace(update_freq=[1], use_bmuf=False),
        distributed_training=SimpleNamespace(ddp_backend="legacy_ddp"),
    )  # fmt: skip


@pytest.fixture(params=["bf16", "fp16", "fp16 in one vector"])
def optimizer(request, monkeypatch) -> FP16Optimizer:
    """fairseq's, over weights of three shapes."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # where fairseq puts the one vector
    is_bf16, joined = request.param == "bf16", "vector" in request.param
    weights = [torch.nn.Parameter(torch.ones(shape, dtype=[torch.half, torch.bfloat16][is_bf16])) for shape in SHAPES]
    cfg = config(is_bf16, joined)
    masters = FP16Optimizer.build_fp32_params(cfg.optimizer, weights, flatten=joined)
    return FP16Optimizer(cfg, weights, FusedAdam(cfg.optimizer, masters.values() if joined else masters), masters)


def step(optimizer: FP16Optimizer, gradients: list[list[torch.Tensor]], skips=()) -> tuple[torch.Tensor, float]:
    """All gradients' sums as one vector, in double precision, as the optimizer steps with them, and their norm.

    `skips` tells for each batch how many of the first weights it does not use.
    """
    count = len(gradients)
    trainer = SimpleNamespace(optimizer=optimizer, guard=object(), data_parallel_world_size=1)
    with SafeTrainer._exact_sums(trainer, count):
        optimizer.zero_grad()
        for number, sample in enumerate(gradients):
            pairs = list(zip(optimizer.fp16_params, sample, strict=True))[skips[number] if skips else 0 :]
            optimizer.backward(sum((weight * gradient).sum() for weight, gradient in pairs).float())
        optimizer.multiply_grads(1 / count)
        norm = optimizer.clip_grad_norm(0.0)
        optimizer._unscale_grads()
    masters = optimizer.fp32_params
    masters = masters.values() if isinstance(masters, dict) else masters
    return count * torch.cat([master.grad.flatten() for master in masters]).double(), count * float(norm)


def draw(optimizer: FP16Optimizer, batches: int, scale: float = 1.0) -> list[list[torch.Tensor]]:
    """Gradients of a mean, in which batches agree, and noise."""
    random = torch.Generator().manual_seed(1)
    dtype = optimizer.fp16_params[0].dtype
    return [[(scale * (1 + torch.rand(shape, generator=random))).to(dtype) for shape in SHAPES] for _ in range(batches)]


def exact(gradients: list[list[torch.Tensor]]) -> torch.Tensor:
    return sum(torch.cat([gradient.double().flatten() for gradient in sample]) for sample in gradients)


def test_512_batches_add_up(optimizer):
    gradients = draw(optimizer, 512)
    for _ in range(2):  # the second update begins at zero
        found, norm = step(optimizer, gradients)
        torch.testing.assert_close(found, exact(gradients), rtol=1e-5, atol=0)
        assert norm == pytest.approx(float(exact(gradients).norm()), rel=1e-5)
    assert optimizer.groups_of_sums is None


def test_few_batches_add_up_as_fairseq_adds_them(optimizer):
    gradients = draw(optimizer, EXACT_ENOUGH)
    scale = 1 if optimizer.scaler is None else optimizer.scaler.loss_scale
    total = [scale * gradient for gradient in gradients[0]]
    for sample in gradients[1:]:
        total = [sums + scale * gradient for sums, gradient in zip(total, sample, strict=True)]
    expected = torch.cat([sums.flatten() for sums in total]).double() / scale
    torch.testing.assert_close(step(optimizer, gradients)[0], expected)


def test_a_weight_that_few_batches_use_has_their_sum(optimizer):
    gradients = draw(optimizer, 20)
    skips = [2 if number in (3, 7) else 1 for number in range(20)]  # the first weight in all, the second in two
    found, _ = step(optimizer, gradients, skips)
    for sample, skipped in zip(gradients, skips, strict=True):
        for gradient in sample[:skipped]:
            gradient.zero_()
    torch.testing.assert_close(found, exact(gradients), rtol=1e-5, atol=0)


@pytest.mark.parametrize("optimizer", ["fp16", "fp16 in one vector"], indirect=True)
def test_a_sum_may_be_larger_than_fp16_but_no_batch_s_gradient(optimizer):
    gradients = draw(optimizer, 32, scale=6000.0)  # times the loss scale, 4: each below 65,504, their sum above
    torch.testing.assert_close(step(optimizer, gradients)[0], exact(gradients), rtol=1e-5, atol=0)
    assert optimizer.scaler.loss_scale == 4
    gradients[5][1][0] = torch.inf
    with pytest.raises(OverflowError):
        step(optimizer, gradients)
    assert optimizer.scaler.loss_scale == 2 and optimizer.groups_of_sums is None


SMALL = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 1 --dropout 0"
SMALL = f"{SMALL} --disable-validation --clip-norm 1.0"


@pytest.mark.parametrize("precision", ["--bf16", pytest.param("--fp16", marks=pytest.mark.slow)])
def test_a_run_of_large_updates_goes_on_bit_for_bit(fairseq_train, data_folder, tmp_path, precision):
    options = f"{SMALL} {precision} --update-freq 9 --max-update 4"
    with mock.patch.object(FP16Optimizer, "_add", autospec=True, side_effect=FP16Optimizer._add) as add:
        expected = fairseq_train(data_folder, f"{options} --save-interval-updates 2", tmp_path / "whole")
    assert add.call_count == 4 * 9
    half = tmp_path / "whole" / "checkpoint_1_2.pt"
    found = fairseq_train(data_folder, f"{options} --restore-file {half}", tmp_path / "resumed")
    assert all(torch.equal(found["model"][name], value) for name, value in expected["model"].items())


@pytest.mark.slow
def test_two_processes_add_up_as_one_does(fairseq_train, data_folder, tmp_path, free_port):
    options = f"{SMALL} --bf16 --max-update 1"
    alone = fairseq_train(data_folder, f"{options} --update-freq 18", tmp_path / "one")
    words = train_words(data_folder, f"{options} --update-freq 9", tmp_path / "two")
    run = train_in_two_processes(words, free_port)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    states = alone["last_optimizer_state"], torch.load(tmp_path / "two" / "checkpoint_last.pt")["last_optimizer_state"]
    one, two = (torch.cat([each["exp_avg"].flatten() for each in state["state"].values()]) for state in states)
    assert (one - two).norm() < 3e-3 * one.norm()  # the last two batches' mean is rounded to bf16
